"""The shapes of the tiny model and the `config.json` that describes them, for each architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ARCHITECTURES = ("qwen3_next", "qwen3_5")


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the tiny model. The defaults run in seconds in Triton's interpreter.

    Attributes:
        head_dim: K = V of the GDN heads; 128 is what the real models have.
        num_k_heads, num_v_heads: GDN heads H and HV.
        attention_head_dim, num_attention_heads, num_kv_heads: the full-attention layers.
        full_attention_interval: every n-th layer is full attention, the others are GDN.
        num_experts, experts_per_token: `qwen3_next` only, whose layers are all sparse; `qwen3_5` is dense.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 4
    full_attention_interval: int = 4
    num_k_heads: int = 2
    num_v_heads: int = 4
    head_dim: int = 32
    conv_width: int = 4
    num_attention_heads: int = 4
    num_kv_heads: int = 2
    attention_head_dim: int = 32
    num_experts: int = 2
    experts_per_token: int = 2
    max_position: int = 4096

    @property
    def key_dim(self) -> int:
        return self.num_k_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        return self.num_v_heads * self.head_dim

    def is_full_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0


def model_config(architecture: str, shape: TinyShape, dtype: str) -> dict[str, Any]:
    """The content of `config.json`."""
    if architecture == "qwen3_next":
        return _qwen3_next(shape, dtype)
    if architecture == "qwen3_5":
        return _qwen3_5(shape, dtype)
    raise ValueError(f"unknown architecture {architecture!r}; choose one of {', '.join(ARCHITECTURES)}")


def _common(shape: TinyShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.attention_head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "linear_conv_kernel_dim": shape.conv_width,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_num_key_heads": shape.num_k_heads,
        "linear_num_value_heads": shape.num_v_heads,
        "full_attention_interval": shape.full_attention_interval,
        "mamba_ssm_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _qwen3_next(shape: TinyShape, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "torch_dtype": dtype,
        **_common(shape),
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "num_nextn_predict_layers": 1,
        "decoder_sparse_step": 1,
        "num_experts": shape.num_experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.intermediate_size,
        "shared_expert_intermediate_size": shape.intermediate_size,
        "norm_topk_prob": True,
    }


def _qwen3_5(shape: TinyShape, dtype: str) -> dict[str, Any]:
    rotary = shape.attention_head_dim // 4  # partial_rotary_factor 0.25; mrope divides half of it among t, h, w
    side = rotary // 8
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "image_token_id": shape.vocab_size - 3,
        "video_token_id": shape.vocab_size - 2,
        "vision_start_token_id": shape.vocab_size - 1,
        "text_config": {
            "model_type": "qwen3_5_text",
            "dtype": dtype,
            **_common(shape),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [rotary // 2 - 2 * side, side, side],
                "mrope_interleaved": True,
            },
            "mtp_num_hidden_layers": 1,
            "attn_output_gate": True,
        },
        # The vision tower is built by SGLang but never run: it only has to be small.
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 1,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": shape.hidden_size,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [],
            "hidden_act": "gelu_pytorch_tanh",
        },
    }
