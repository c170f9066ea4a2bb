"""The model's sizes and its `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_replayssm.demo_task import vocabulary

MAX_POSITION = 65536
ROPE_THETA = 1e7
ROTARY_FACTOR = 0.25
NORM_EPS = 1e-6


@dataclass(frozen=True)
class ModelShape:
    """Sizes of the Qwen3-Next model. The defaults have 4.0 M parameters, 8 MB in bf16.

    Attributes:
        k_heads, v_heads, gdn_head: GDN heads H and HV, and K = V.
        heads, kv_heads, attention_head: the full-attention layers.
        interval: every n-th layer is full attention, the others are GDN.
        experts: routed experts; every token uses `active` of them beside the shared one. With both equal, the router
            weighs and never drops, so nothing is discontinuous.
        intermediate: width of each expert and of the shared one.
    """

    hidden: int = 256
    layers: int = 4
    interval: int = 4
    k_heads: int = 2
    v_heads: int = 4
    gdn_head: int = 128
    conv_width: int = 4
    heads: int = 4
    kv_heads: int = 2
    attention_head: int = 64
    experts: int = 2
    active: int = 2
    intermediate: int = 128
    vocab: int = vocabulary.VOCAB_SIZE

    @property
    def key_dim(self) -> int:
        return self.k_heads * self.gdn_head

    @property
    def value_dim(self) -> int:
        return self.v_heads * self.gdn_head

    @property
    def rotary_dim(self) -> int:
        return int(self.attention_head * ROTARY_FACTOR)

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.interval == 0

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ModelShape:
        """The shape that a `config.json` describes."""
        return cls(**{field: config[key] for field, key in _CONFIG_KEYS.items()})

    def config(self, dtype: str) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "torch_dtype": dtype,
            **{key: getattr(self, field) for field, key in _CONFIG_KEYS.items()},
            "shared_expert_intermediate_size": self.intermediate,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_POSITION,
            "rms_norm_eps": NORM_EPS,
            "rope_theta": ROPE_THETA,
            "partial_rotary_factor": ROTARY_FACTOR,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mamba_ssm_dtype": "float32",
            "num_nextn_predict_layers": 1,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
            "linear_value_head_dim": self.gdn_head,
            "bos_token_id": None,
            "eos_token_id": vocabulary.END_ID,
            "pad_token_id": vocabulary.END_ID,
        }


_CONFIG_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "interval": "full_attention_interval",
    "k_heads": "linear_num_key_heads",
    "v_heads": "linear_num_value_heads",
    "gdn_head": "linear_key_head_dim",
    "conv_width": "linear_conv_kernel_dim",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "attention_head": "head_dim",
    "experts": "num_experts",
    "active": "num_experts_per_tok",
    "intermediate": "moe_intermediate_size",
    "vocab": "vocab_size",
}
