"""A model of scripts/train_demo_model.py in the real engine: it says what it says in training, and drafts as it did.

A small one, taught three texts for a few seconds: well enough that its drafts are accepted there, badly enough that on
another prompt many are not.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang_cpusim", reason="needs tests/cpusim installed (make setup)")

from engine_harness import NEXTN, Batch, run_engine

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from training.data import batch_of
from training.decode import generate
from training.evaluate import drafts_right, walk
from training.export import export
from training.model import DemoModel
from training.objective import DRAFTS, losses
from training.shape import ModelShape

from sglang_replayssm.demo_task import draw_register, vocabulary

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]

# Two layers, because Triton's interpreter is slow.
SMALL = ModelShape(
    hidden=64,
    layers=2,
    interval=2,
    k_heads=1,
    v_heads=2,
    gdn_head=32,
    heads=2,
    kv_heads=1,
    attention_head=32,
    intermediate=64,
)
STEPS, NEW_TOKENS = 30, 24


@pytest.fixture(scope="module")
def taught():
    """The model, and two prompts: one whose answer it was taught, and a foreign one."""
    problems = [draw_register("train", index, rounds=2, fast=3, slow=1) for index in range(4)]
    prompts = [vocabulary.prompt_ids(problem.question) for problem in problems]
    documents = [(p + vocabulary.answer_ids(q.solution), len(p)) for p, q in zip(prompts, problems, strict=True)]
    batch = batch_of(documents[:3], max(len(ids) for ids, _ in documents) + DRAFTS + 1)
    model = DemoModel(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    rng = random.Random(0)
    for _ in range(STEPS):
        trunk, drafts = losses(model, batch, rng)
        (trunk + drafts.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), [prompts[0], prompts[3]]


@pytest.fixture(scope="module")
def served(taught, tmp_path_factory):
    from sglang_cpusim import engine_arguments, environment

    model, prompts = taught
    directory = export(model, tmp_path_factory.mktemp("demo-model"), "float32")
    result = run_engine(
        directory,
        [Batch(prompts=prompts, max_new_tokens=NEW_TOKENS)],
        env=environment(),
        **engine_arguments(),
        disable_radix_cache=True,
        max_running_requests=2,
        max_mamba_cache_size=6,
        **NEXTN,
    )
    return result.batches[0]


def test_greedy_tokens(taught, served):
    model, prompts = taught
    assert [output.tokens for output in served] == generate(model, prompts, NEW_TOKENS, ignore_end=True)


def test_every_draft_is_the_one_that_training_saw(taught, served):
    """The training's parallel chains predict how many verify steps the engine takes, and it accepts all or few."""
    model, prompts = taught
    predicted = []
    for prompt, output in zip(prompts, served, strict=True):
        tokens = torch.tensor([prompt + output.tokens + [0] * (DRAFTS + 1)])
        window = range(len(prompt) - 1, len(prompt) + len(output.tokens) - 2)
        with torch.no_grad():
            right = drafts_right(model, tokens, model.hidden(tokens), window)
        predicted.append(walk(right[0])[0])
    assert [output.verify_steps for output in served] == predicted
    assert served[0].acceptance_length > 3.5
    assert served[1].acceptance_length < 3.5
