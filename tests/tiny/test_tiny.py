"""The tiny model as files: complete, deterministic, lively."""

from __future__ import annotations

import json

import pytest

from sglang_replayssm.tiny import ARCHITECTURES, ZERO_LOGIT_TOKEN, TinyShape, write_tiny_model
from sglang_replayssm.tiny.weights import lively_weights, tensor_shapes

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


@architectures
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files(tmp_path, architecture, dtype):
    write_tiny_model(tmp_path, architecture, dtype=dtype)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == architecture
    assert config["torch_dtype"] == dtype
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == dict(tensor_shapes(architecture, TinyShape()))
    for name, tensor in stored.items():
        assert tensor.dtype == (torch.float32 if name.endswith("A_log") else getattr(torch, dtype)), name
        assert torch.isfinite(tensor).all(), name


@architectures
def test_shape_parameters_reach_config_and_tensors(tmp_path, architecture):
    write_tiny_model(tmp_path, architecture, head_dim=128, hidden_size=256, num_v_heads=8)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.get("text_config", config)
    assert text["linear_key_head_dim"] == text["linear_value_head_dim"] == 128
    conv = next(t for n, t in load_file(tmp_path / "model.safetensors").items() if n.endswith("conv1d.weight"))
    assert conv.shape == (2 * 2 * 128 + 8 * 128, 1, 4)


@architectures
def test_a_config_alone_for_dummy_weights(tmp_path, architecture):
    write_tiny_model(tmp_path, architecture, weights=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@architectures
def test_seed_decides(architecture):
    first, again = (lively_weights(architecture, TinyShape(), seed=3) for _ in range(2))
    other = lively_weights(architecture, TinyShape(), seed=4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@architectures
def test_weights_do_not_depend_on_the_default_dtype(architecture):
    expected = lively_weights(architecture, TinyShape())
    torch.set_default_dtype(torch.float16)
    try:
        weights = lively_weights(architecture, TinyShape())
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@architectures
def test_the_head_counts_on(architecture):
    """Left alone, token n is followed by n + 1, and the draft head passes the newest token's embedding through."""
    weights = lively_weights(architecture, TinyShape())
    embedding = next(tensor for name, tensor in weights.items() if name.endswith("embed_tokens.weight"))
    following = (embedding @ weights["lm_head.weight"].T).argmax(dim=1)
    assert torch.equal(following[:-1], torch.arange(1, len(embedding)))
    assert not weights["lm_head.weight"][ZERO_LOGIT_TOKEN].any()
    hidden = embedding.shape[1]
    assert torch.equal(weights["mtp.fc.weight"][:, :hidden], torch.eye(hidden))


def test_unknown_architecture(tmp_path):
    with pytest.raises(ValueError, match="qwen3_next"):
        write_tiny_model(tmp_path, "llama")
