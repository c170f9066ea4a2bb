"""Trains, judges and exports the demo model: a small Qwen3-Next with an MTP head, for the tasks of demo_task.

    python scripts/train_demo_model.py train --run runs/demo --minutes 8.5      # again, until it says "complete"
    python scripts/train_demo_model.py evaluate --run runs/demo
    python scripts/train_demo_model.py corrupt --run runs/demo
    python scripts/train_demo_model.py export --run runs/demo --out models/demo
    python scripts/train_demo_model.py plot --run runs/demo

Training takes `--total-minutes` in all, in parts of `--minutes`; each part goes on where the last one stopped. It needs
torch alone; export needs safetensors and tokenizers, plot matplotlib.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed

import torch
from training import damage, trainer
from training.decode import generate
from training.display import Display
from training.evaluate import evaluate
from training.export import export
from training.shape import ModelShape

from sglang_replayssm.demo_task import RegisterProblem, draw_register, draw_story, registers, vocabulary

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (4096, 8192, 16384, 32768)


def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    if not torch.cuda.is_available():
        torch.set_flush_denormal(True)
    return options.command(options)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name: str, function: Callable, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help)
        added.set_defaults(command=function)
        added.add_argument("--run", type=Path, required=True, help="directory of checkpoint and log")
        return added

    defaults = trainer.Settings()
    added = command("train", train, "train for some minutes, from the checkpoint if there is one")
    added.add_argument("--minutes", type=float, default=8.5, help="of this part (default: %(default)s)")
    added.add_argument(
        "--total-minutes", type=float, default=defaults.total_seconds / 60, help="(default: %(default)s)"
    )
    added.add_argument("--layers", type=int, default=defaults.shape.layers, help="default: %(default)s")
    added.add_argument("--rate", type=float, default=defaults.peak_rate, help="peak (default: %(default)s)")
    added.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="that make problems")
    added = command("evaluate", judge, "share of validation problems solved without a wrong token, by length")
    added.add_argument("--problems", type=int, default=64, help="of each kind (default: %(default)s)")
    added.add_argument("--split", default="validation", choices=("validation", "test"))
    added.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of long solutions, in tokens")
    added.add_argument("--decode", type=int, default=0, help="also decode so many tokens one by one (default: 0)")
    added = command("corrupt", corrupt, "decode with a damaged recurrent state, and count what goes wrong")
    added.add_argument("--problems", type=int, default=16)
    added.add_argument("--rounds", type=int, default=6)
    added = command("export", write, "write the model for SGLang and Transformers")
    added.add_argument("--out", type=Path, required=True)
    command("plot", plot, "draw the log")
    return parser.parse_args(argv)


def train(options: argparse.Namespace) -> int:
    settings = trainer.Settings(
        shape=ModelShape(layers=options.layers),
        total_seconds=60 * options.total_minutes,
        peak_rate=options.rate,
    )
    run = trainer.Trainer(options.run, settings, DEVICE)
    with Display() as display:
        run.run(60 * options.minutes, options.workers, display)
    with contextlib.suppress(ImportError):  # matplotlib need not be there; `plot` draws it elsewhere
        plot(options)
    state = "complete" if run.progress >= 1 else f"{100 * run.progress:.1f} % done, run the same command again"
    print(f"{state}: {run.step} steps, {run.tokens / 1e6:.0f}M tokens, {run.seconds / 60:.1f} minutes")
    return 0


def judge(options: argparse.Namespace) -> int:
    model, settings = trainer.load_model(options.run, DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    task = settings.task

    def drawn(length: int) -> list[RegisterProblem]:
        rounds = registers.rounds_within(length, task.fast)
        return [draw_register(options.split, i, rounds, task.fast, task.slow) for i in range(options.problems)]

    print("stories:", evaluate(model, [draw_story(options.split, i) for i in range(options.problems)], rows=64))
    for length in options.lengths:
        report = evaluate(model, drawn(length), rows=max(1, 65536 // length))
        print(f"registers, {length} tokens: {report}", flush=True)
    if options.decode:
        problems = drawn(options.decode)
        prompts = [vocabulary.prompt_ids(problem.question) for problem in problems]
        texts = map(vocabulary.decode, generate(model, prompts, options.decode + 1))
        grades = [problem.grade(text) for problem, text in zip(problems, texts, strict=True)]
        right, exact = sum(g.correct for g in grades), sum(g.exact for g in grades)
        print(f"decoded, {options.decode} tokens: {right}/{len(grades)} answers right, {exact} exact")
    return 0


def corrupt(options: argparse.Namespace) -> int:
    model, settings = trainer.load_model(options.run, DEVICE, torch.float32)
    task = settings.task
    problems = [draw_register("validation", i, options.rounds, task.fast, task.slow) for i in range(options.problems)]
    for line in damage.table(model, problems):
        print(line, flush=True)
    return 0


def write(options: argparse.Namespace) -> int:
    model, _ = trainer.load_model(options.run, "cpu", torch.float32)
    directory = export(model, options.out)
    size = (directory / "model.safetensors").stat().st_size
    print(f"{directory}: {size / 1e6:.1f} MB")
    return 0


def plot(options: argparse.Namespace) -> int:
    from training.plot import draw

    print(draw(options.run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
