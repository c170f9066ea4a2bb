"""Rows, loss, schedule, and a run in two parts."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from small_model import SMALL
from train_demo_model import main
from training.damage import damage_once
from training.data import STORY_ROW, Batches, TaskSize, batch_of, long_batch, register_row, row_tokens, story_row
from training.decode import generate
from training.display import Display
from training.evaluate import evaluate, walk
from training.export import load_export
from training.model import DemoModel
from training.objective import losses
from training.schedule import CURRICULUM, Stage, learning_rate, stage_at
from training.trainer import LOG, Settings, Trainer, load_model

from sglang_replayssm.demo_task import draw_register, registers, vocabulary

TASK = TaskSize(fast=3, slow=1, rounds=6)
ROW, SHORT = row_tokens(2, TASK), row_tokens(1, TASK)


@pytest.mark.parametrize("longest", [1024, 4096])
def test_long_batches_fill_their_rows_with_documents_from_the_beginning(longest):
    rng = random.Random(0)
    batches = [long_batch(rng, TaskSize(), longest, 8192) for _ in range(30)]
    lengths = [batch.shape[1] for batch in batches]
    assert longest - 159 < max(lengths) <= longest
    assert len(set(lengths)) > 3
    ends, prompt = [], registers.question_tokens() + 2
    for batch in batches:
        assert 8192 - longest < batch.tokens.size <= 8192
        assert (batch.supervised == (np.arange(batch.shape[1]) >= prompt)).all()
        for row in batch.tokens:
            assert vocabulary.decode(row).startswith("Registers a")
            assert row[prompt - 1] == vocabulary.IDS[vocabulary.ASSISTANT]
            ends.append(row[-1] == vocabulary.END_ID)
    assert 0.3 < np.mean(ends) < 0.8


def test_every_number_of_rounds_is_asked_for():
    rng = random.Random(0)
    asked = {vocabulary.decode(register_row(rng, 2, TASK)[0]).split("Rounds ")[1][:3] for _ in range(100)}
    assert asked == {"002", "003", "004", "005", "006"}


def test_only_the_answer_is_supervised():
    documents = [story_row(random.Random(n)) for n in range(8)]
    batch = batch_of(documents, STORY_ROW)
    for row, (ids, prompt) in enumerate(documents):
        assert np.flatnonzero(batch.supervised[row]).tolist() == list(range(prompt, len(ids)))
        assert batch.tokens[row, : len(ids)].tolist() == ids


def test_worker_processes_make_batches_of_the_asked_length():
    with Batches("seed", TASK, story_rows=2, workers=1) as batches:
        stream = batches.stream(ROW, 4 * ROW)
        long, stories = next(stream)
        assert long.shape in ((4, ROW), (6, SHORT))
        assert stories.shape == (2, STORY_ROW)
        batches.resize(2 * ROW, 4 * ROW)
        assert any(next(stream)[0].shape[1] > ROW for _ in range(30))


def test_another_seed_makes_other_documents():
    first, again, other = (
        next(Batches(seed, TASK, 1, workers=0).stream(ROW, 2 * ROW))[0].tokens for seed in ("a", "a", "b")
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_the_loss_of_an_ignorant_model_is_that_of_guessing():
    model = DemoModel(SMALL)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        batch = batch_of([register_row(random.Random(0), 2, TASK)], ROW)
        trunk, drafts = losses(model, batch, random.Random(0))
    guess = np.log(SMALL.vocab)
    assert trunk.item() == pytest.approx(guess, rel=1e-5)
    assert drafts.tolist() == pytest.approx([guess] * 3, rel=1e-5)


def test_schedule():
    assert learning_rate(0.02, 1.0) == pytest.approx(1.0)
    assert learning_rate(0.0, 1.0) < learning_rate(0.01, 1.0) < 1
    assert learning_rate(1.0, 1.0) == pytest.approx(0.01)
    assert stage_at(0.0) == CURRICULUM[0]
    assert stage_at(CURRICULUM[0].until) == CURRICULUM[1]
    assert stage_at(1.0) == CURRICULUM[-1]
    assert CURRICULUM[-1].longest == 32768
    assert [stage.until for stage in CURRICULUM] == sorted(stage.until for stage in CURRICULUM)


def test_walk():
    """Steps: 3 drafts accepted, then none, then one, then one that runs over the end."""
    right = torch.tensor(
        [[1, 1, 1], [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool
    )
    assert walk(right) == (4, 4 + 1 + 2 + 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run in two parts: its directory, and the trainers as each part left them."""
    directory = tmp_path_factory.mktemp("run")
    settings = Settings(
        shape=SMALL,
        task=TASK,
        total_seconds=6,
        story_rows=1,
        peak_rate=1e-2,
        dtype="float32",
        stages=(Stage(1.0, ROW, 4 * ROW),),
    )
    first = Trainer(directory, settings, "cpu")
    with Display() as display:
        first.run(seconds=3, workers=0, display=display)
    resumed = Trainer(directory, Settings(), "cpu")
    assert resumed.settings == settings
    assert (resumed.step, resumed.seconds, resumed.tokens) == (first.step, first.seconds, first.tokens)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), resumed.model.parameters(), strict=True))
    assert resumed.optimizer.state_dict()["state"][0]["step"] == first.step
    with Display() as display:
        resumed.run(seconds=60, workers=0, display=display)
    return directory, first, resumed


@pytest.mark.slow  # trains for seconds by the clock
def test_the_second_part_completes_the_run(run):
    _, first, second = run
    assert 0 < first.progress < second.progress == 1
    assert second.step > first.step


@pytest.mark.slow  # trains for seconds by the clock
def test_the_log_is_whole_and_every_loss_falls(run):
    directory, _, second = run
    records = [json.loads(line) for line in (directory / LOG).read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, second.step + 1))
    assert records[-1]["long"] < 0.8 * records[0]["long"]
    assert records[-1]["story"] < 0.9 * records[0]["story"]
    assert all(b < 0.9 * a for a, b in zip(records[0]["long_drafts"], records[-1]["long_drafts"], strict=True))


@pytest.mark.slow  # trains for seconds by the clock
def test_evaluation_counts(run):
    model, _ = load_model(run[0], "cpu", torch.float32)
    problems = [draw_register("validation", n, 1, TASK.fast, TASK.slow) for n in range(5)]
    report = evaluate(model, problems, rows=2)
    assert report.problems == 5
    assert report.tokens == sum(len(vocabulary.answer_ids(problem.solution)) for problem in problems)
    assert 1 <= report.acceptance <= 4
    assert 0 < report.wrong < report.tokens
    assert report.exact == 0


@pytest.mark.slow  # trains for seconds by the clock
def test_the_commands_work_on_a_run(run, tmp_path, capsys):
    directory = str(run[0])
    assert main(["evaluate", "--run", directory, "--problems", "2", "--lengths", "128", "--decode", "64"]) == 0
    assert main(["corrupt", "--run", directory, "--problems", "2", "--rounds", "1"]) == 0
    assert main(["export", "--run", directory, "--out", str(tmp_path / "model")]) == 0
    assert main(["plot", "--run", directory]) == 0
    assert main(["train", "--run", directory]) == 0
    printed = capsys.readouterr().out
    for text in ("stories: 0/2 exact", "registers, 128 tokens:", "decoded, 64 tokens:", "erased: 0/2", "complete"):
        assert text in printed
    assert load_export(tmp_path / "model", torch.float32).shape == SMALL
    assert (run[0] / "loss.png").stat().st_size > 0


@pytest.mark.slow  # trains for seconds by the clock
def test_damage_is_done_once_and_to_recurrent_states_alone(run):
    model, _ = load_model(run[0], "cpu", torch.float32)
    prompt = vocabulary.prompt_ids(draw_register("train", 0, 1, TASK.fast, TASK.slow).question)
    seen = []

    def damage(state: torch.Tensor) -> torch.Tensor:
        seen.append(state.shape)
        return torch.zeros_like(state)

    intact = generate(model, [prompt], 20, ignore_end=True)[0]
    damaged = generate(model, [prompt], 20, on_step=damage_once(10, damage), ignore_end=True)[0]
    layers = SMALL.layers - SMALL.layers // SMALL.interval
    assert seen == [(1, SMALL.v_heads, SMALL.gdn_head, SMALL.gdn_head)] * layers
    assert damaged[:10] == intact[:10]
    assert damaged != intact
