"""The shape of the model in these tests."""

from __future__ import annotations

from training.shape import ModelShape

SMALL = ModelShape(
    hidden=32, k_heads=1, v_heads=2, gdn_head=16, heads=2, kv_heads=1, attention_head=32, intermediate=32
)
