"""SGLang's ServerArgs with the flags, and the tiny GDN config that the plugin tests use."""

from __future__ import annotations

import json
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before SGLang is imported: these tests look nothing up

pytest.importorskip("sglang", reason="the plugin needs SGLang")

from sglang_replayssm.plugin import flags

TINY_CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "num_experts": 2,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="session", autouse=True)
def server_flags():
    """The flags are part of ServerArgs in every test, as after SGLang loaded the plugin."""
    flags.add_to_server_args()


@pytest.fixture
def model_dir(tmp_path):
    """Write a config.json and return its folder; keyword arguments override fields of the tiny config."""

    def write(**overrides) -> str:
        (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | overrides))
        return str(tmp_path)

    return write
