"""The chunked rule against the sequential recurrence, values and gradients."""

from __future__ import annotations

import pytest
import torch
from training.delta_rule import delta_rule

from sglang_replayssm.kernels.recurrence import recurrence, softplus

NAMES = ("q", "k", "v", "a", "b", "A_log", "dt_bias", "state")


def inputs(tokens: int, seed: int = 0, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, v_heads, size = 2, 2, 4, 8
    shapes = {
        "q": (batch, tokens, heads, size),
        "k": (batch, tokens, heads, size),
        "v": (batch, tokens, v_heads, size),
        "a": (batch, tokens, v_heads),
        "b": (batch, tokens, v_heads),
        "A_log": (v_heads,),
        "dt_bias": (v_heads,),
        "state": (batch, v_heads, size, size),
    }
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


def chunked(x: dict[str, torch.Tensor], **options) -> tuple[torch.Tensor, torch.Tensor]:
    g = -x["A_log"].exp() * softplus(x["a"] + x["dt_bias"])
    return delta_rule(x["q"], x["k"], x["v"], g, x["b"].sigmoid(), x["state"], **options)


@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_values(tokens):
    x = inputs(tokens)
    out, state = chunked(x)
    expected = recurrence(**x)
    torch.testing.assert_close(out, expected.out, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(state, expected.states[:, -1], rtol=1e-11, atol=1e-12)


def test_gradients():
    """Of outputs and final state, with respect to every input, against autograd through the recurrence."""
    x = {name: value.requires_grad_() for name, value in inputs(70).items()}
    generator = torch.Generator().manual_seed(1)
    out, state = chunked(x, chunk=16)
    expected = recurrence(**x)
    d_out = torch.randn(out.shape, generator=generator, dtype=out.dtype)
    d_state = torch.randn(state.shape, generator=generator, dtype=out.dtype)
    ours = torch.autograd.grad([out, state], list(x.values()), [d_out, d_state])
    theirs = torch.autograd.grad([expected.out, expected.states[:, -1]], list(x.values()), [d_out, d_state])
    for name, a, b in zip(NAMES, ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_a_state_is_carried_on():
    x = inputs(100)
    whole, final = chunked(x)
    cut = {name: x[name][:, :37] for name in ("q", "k", "v", "a", "b")}
    rest = {name: x[name][:, 37:] for name in ("q", "k", "v", "a", "b")}
    first, state = chunked({**x, **cut})
    second, last = chunked({**x, **rest, "state": state})
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(last, final, rtol=1e-11, atol=1e-12)


def test_fp32_holds_where_one_key_is_overwritten_again_and_again():
    """All keys equal, beta 1, no decay: each value replaces the last, and an inverse by powers would explode."""
    x = inputs(256, dtype=torch.float32)
    x["k"] = x["k"][:, :1].expand_as(x["k"])
    x["q"] = x["k"]
    g = torch.zeros_like(x["a"])
    out, _ = delta_rule(x["q"], x["k"], x["v"], g, torch.ones_like(g), torch.zeros_like(x["state"]))
    torch.testing.assert_close(out, x["v"] * x["k"].shape[-1] ** -0.5, rtol=1e-4, atol=1e-4)


def test_fp32_arithmetic_for_bf16_inputs():
    x = {name: value.to(torch.bfloat16) for name, value in inputs(130).items()}
    g = -x["A_log"].float().exp() * softplus(x["a"].float() + x["dt_bias"].float())
    out, state = delta_rule(x["q"], x["k"], x["v"], g, x["b"].float().sigmoid(), x["state"])
    expected = recurrence(**x)
    assert out.dtype == state.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected.out, rtol=1e-4, atol=1e-5)


def test_strong_decay_does_not_overflow():
    x = inputs(64)
    x["A_log"] = x["A_log"] + 8
    leaf = x["k"].requires_grad_()
    out, _ = chunked(x)
    (gradient,) = torch.autograd.grad(out.sum(), leaf)
    assert out.isfinite().all()
    assert gradient.isfinite().all()
