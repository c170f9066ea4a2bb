"""A model that is only a config.json: the shape of Qwen3.5-35B-A3B, or a tiny one, to be served with dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

FULL = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000000,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": "float32",
    "decoder_sparse_step": 1,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "num_nextn_predict_layers": 1,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "initializer_range": 0.02,
}
# For trying the script out: same head sizes, little else.
TINY = FULL | {"num_hidden_layers": 8, "hidden_size": 512, "num_experts": 8, "num_experts_per_tok": 2}
SHAPES = {"full": FULL, "tiny": TINY}


def gdn_layers(shape: str) -> int:
    """All but every `full_attention_interval`-th layer."""
    layers, interval = SHAPES[shape]["num_hidden_layers"], SHAPES[shape]["full_attention_interval"]
    return layers - layers // interval


def write_model(folder: Path, shape: str) -> Path:
    """A model folder for --model-path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=1))
    return folder
