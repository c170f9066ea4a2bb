"""The model against Transformers' Qwen3-Next, its caches against its parallel form, its size against the limit."""

from __future__ import annotations

import json

import pytest
import torch
from small_model import SMALL
from training.decode import generate
from training.export import MAX_BYTES, WEIGHTS, export, load_export
from training.model import DemoModel
from training.shape import ModelShape

from sglang_replayssm.demo_task import vocabulary


def test_transformers_computes_the_same(model, tokens, tmp_path):
    transformers = pytest.importorskip("transformers")
    export(model, tmp_path, "float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, model(tokens), rtol=1e-4, atol=1e-5)


def test_decoding_continues_what_the_parallel_form_says(model, tokens):
    caches = model.empty_caches(len(tokens), tokens.shape[1])
    with torch.no_grad():
        parts = [model.hidden(tokens[:, :70], caches)]
        parts += [model.hidden(tokens[:, n : n + 1], caches, n) for n in range(70, tokens.shape[1])]
        torch.testing.assert_close(torch.cat(parts, 1), model.hidden(tokens), rtol=1e-4, atol=1e-5)


def test_generation_is_greedy_and_ends_at_the_end_token(model, tokens):
    prompts = tokens[:, :20].tolist()
    written = generate(model, prompts, 12, ignore_end=True)
    with torch.no_grad():
        for prompt, row in zip(prompts, written, strict=True):
            whole = torch.tensor([prompt + row])
            assert model(whole)[0, len(prompt) - 1 : -1].argmax(-1).tolist() == row
    with torch.no_grad():
        model.lm_head.weight[vocabulary.END_ID] = 0
        model.lm_head.weight[vocabulary.END_ID] += 100 * model.hidden(tokens[:1, :20])[0, -1]
    assert generate(model, prompts[:1], 12) == [[vocabulary.END_ID]]


def test_prompts_decoded_together_have_one_length(model):
    with pytest.raises(ValueError, match="one length"):
        generate(model, [[5, 6], [5]], 4)


def test_the_default_model_fits_and_has_the_real_heads(tmp_path):
    model = DemoModel(ModelShape())
    export(model, tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_size < MAX_BYTES
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
        again = load_export(tmp_path, torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True)) or (
            _only_a_log_differs(model, again)
        )


def _only_a_log_differs(model: DemoModel, again: DemoModel) -> bool:
    pairs = zip(model.state_dict().items(), again.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for (name, a), b in pairs if not name.endswith("A_log"))


def test_a_model_that_is_too_large_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="more than"):
        export(DemoModel(ModelShape(layers=16)), tmp_path / "large")
    assert not (tmp_path / "large").exists()


def test_a_shape_survives_its_config():
    for shape in (SMALL, ModelShape(), ModelShape(layers=8, experts=4, active=2)):
        assert ModelShape.from_config(shape.config("float32")) == shape


def test_bf16_stays_near_fp32(model, tokens):
    """The training's arithmetic: hidden states within bf16's reach of fp32's."""
    low = DemoModel(SMALL, torch.bfloat16)
    low.load_state_dict(model.state_dict())
    with torch.no_grad():
        exact, rounded = model.hidden(tokens), low.hidden(tokens)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - exact).norm() / exact.norm()) < 0.05
