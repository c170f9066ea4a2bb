"""Checkpoint tensors of the tiny model: random, but lively enough to make speculation interesting.

Constant or vanishing weights accept every draft or none. Here the output head is the embedding table shifted by one
token, so that the model counts (token n is followed by n + 1) wherever its layers do not push it elsewhere, and the MTP
head passes the newest embedding through, so that it drafts by counting. Drafts are right as long as the target counts
on, and the layers, the GDN state among them, decide when it does not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_replayssm.tiny.config import TinyShape

if TYPE_CHECKING:
    import torch

# Its logit is 0 by construction (a zero row of the output head): log-probabilities relative to its own are logits.
ZERO_LOGIT_TOKEN = 0

# Standard deviation of a projection is GAIN / sqrt(fan_in). Larger: the target departs from counting more often.
TARGET_GAIN = 1.12
DRAFT_GAIN = 0.5


def tensor_shapes(architecture: str, shape: TinyShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor of the checkpoint, target and MTP layer."""
    hidden = shape.hidden_size
    stem = "model.language_model" if architecture == "qwen3_5" else "model"
    yield f"{stem}.embed_tokens.weight", (shape.vocab_size, hidden)
    yield "lm_head.weight", (shape.vocab_size, hidden)
    yield f"{stem}.norm.weight", (hidden,)
    for layer in range(shape.num_layers):
        full = shape.is_full_attention(layer)
        yield from _layer(architecture, shape, f"{stem}.layers.{layer}", full_attention=full)
    yield "mtp.fc.weight", (hidden, 2 * hidden)
    yield "mtp.pre_fc_norm_embedding.weight", (hidden,)
    yield "mtp.pre_fc_norm_hidden.weight", (hidden,)
    yield "mtp.norm.weight", (hidden,)
    yield from _layer(architecture, shape, "mtp.layers.0", full_attention=True)


def lively_weights(architecture: str, shape: TinyShape, seed: int = 0) -> dict[str, torch.Tensor]:
    """The checkpoint in fp32, a function of the arguments only."""
    return {name: _tensor(name, size, seed) for name, size in tensor_shapes(architecture, shape)}


def _layer(architecture: str, shape: TinyShape, stem: str, full_attention: bool):
    hidden = shape.hidden_size
    yield f"{stem}.input_layernorm.weight", (hidden,)
    yield f"{stem}.post_attention_layernorm.weight", (hidden,)
    yield from (_attention(shape, f"{stem}.self_attn") if full_attention else _gdn(architecture, shape, stem))
    if architecture == "qwen3_5":
        yield from _mlp(shape, f"{stem}.mlp")
        return
    yield f"{stem}.mlp.gate.weight", (shape.num_experts, hidden)
    yield f"{stem}.mlp.shared_expert_gate.weight", (1, hidden)
    yield from _mlp(shape, f"{stem}.mlp.shared_expert")
    for expert in range(shape.num_experts):
        yield from _mlp(shape, f"{stem}.mlp.experts.{expert}")


def _attention(shape: TinyShape, stem: str):
    queries = shape.num_attention_heads * shape.attention_head_dim
    keys = shape.num_kv_heads * shape.attention_head_dim
    yield f"{stem}.q_proj.weight", (2 * queries, shape.hidden_size)  # the query and its output gate
    yield f"{stem}.k_proj.weight", (keys, shape.hidden_size)
    yield f"{stem}.v_proj.weight", (keys, shape.hidden_size)
    yield f"{stem}.o_proj.weight", (shape.hidden_size, queries)
    yield f"{stem}.q_norm.weight", (shape.attention_head_dim,)
    yield f"{stem}.k_norm.weight", (shape.attention_head_dim,)


def _gdn(architecture: str, shape: TinyShape, layer_stem: str):
    stem = f"{layer_stem}.linear_attn"
    hidden, key, value, heads = shape.hidden_size, shape.key_dim, shape.value_dim, shape.num_v_heads
    if architecture == "qwen3_5":
        yield f"{stem}.in_proj_qkv.weight", (2 * key + value, hidden)
        yield f"{stem}.in_proj_z.weight", (value, hidden)
        yield f"{stem}.in_proj_b.weight", (heads, hidden)
        yield f"{stem}.in_proj_a.weight", (heads, hidden)
    else:
        yield f"{stem}.in_proj_qkvz.weight", (2 * key + 2 * value, hidden)
        yield f"{stem}.in_proj_ba.weight", (2 * heads, hidden)
    yield f"{stem}.conv1d.weight", (2 * key + value, 1, shape.conv_width)
    yield f"{stem}.A_log", (heads,)
    yield f"{stem}.dt_bias", (heads,)
    yield f"{stem}.norm.weight", (shape.head_dim,)
    yield f"{stem}.out_proj.weight", (hidden, value)


def _mlp(shape: TinyShape, stem: str):
    yield f"{stem}.gate_proj.weight", (shape.intermediate_size, shape.hidden_size)
    yield f"{stem}.up_proj.weight", (shape.intermediate_size, shape.hidden_size)
    yield f"{stem}.down_proj.weight", (shape.hidden_size, shape.intermediate_size)


def _tensor(name: str, size: tuple[int, ...], seed: int) -> torch.Tensor:
    import torch

    def generator(key: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))

    def normal(std: float, key: str = name) -> torch.Tensor:
        return torch.randn(size, generator=generator(key), dtype=torch.float32) * std

    if name.endswith("embed_tokens.weight"):
        return normal(1.0, key="embedding")
    if name == "lm_head.weight":
        head = normal(1.0, key="embedding").roll(1, dims=0)
        head[ZERO_LOGIT_TOKEN] = 0
        return head
    if name == "mtp.fc.weight":
        eye = torch.eye(size[0], dtype=torch.float32)
        return torch.cat([eye, 0.1 * eye], dim=1)  # its input is (embedding, hidden state)
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(size, dtype=torch.float32)
    if name.endswith(("norm.weight", "layernorm.weight")) or ".pre_fc_norm_" in name:
        return torch.zeros(size, dtype=torch.float32)  # these norms scale by 1 + weight
    if name.endswith("A_log"):
        rates = torch.rand(size, generator=generator(name), dtype=torch.float32)
        return (0.02 * 200**rates).log()  # log-uniform in 0.02 .. 4: slow and fast heads
    if name.endswith("dt_bias"):
        return normal(0.5)
    if name.endswith("conv1d.weight"):
        return normal(0.4)
    gain = DRAFT_GAIN if name.startswith("mtp.") else TARGET_GAIN
    return normal(gain / size[-1] ** 0.5)
