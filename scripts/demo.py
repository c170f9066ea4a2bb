"""Serves the tiny model with the real SGLang engine, ReplaySSM off and on, and compares what comes out.

    make demo

On a machine with an NVIDIA GPU it runs there, otherwise on the CPU through Triton's interpreter (a few minutes).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))
from engine_harness import NEXTN, Batch, EngineFailure, EngineResult, Output, run_engine

from sglang_replayssm.tiny import ARCHITECTURES, write_tiny_model

PROMPTS = [
    [5, 6, 7, 8, 9, 10],
    [100, 101, 102],
    [300, 7, 300, 7, 300, 7, 12, 13, 14],
    [17, 200, 31, 200],
]
GPU_ARGUMENTS = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "enable_multimodal": False,
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.3,
    "cuda_graph_backend_prefill": "disabled",
}
NOT_AVAILABLE = "n/a"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_next")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate for each prompt (default: 24)")
    parser.add_argument("--fold", default="fp32", help="fold policy: fp32, exact, every-commit, bf16 (default: fp32)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds an engine may take (default: 900)")
    options = parser.parse_args()
    console = Console()

    on_gpu = has_gpu()
    console.print(f"SGLang's engine on {'the GPU' if on_gpu else 'the CPU, its Triton kernels interpreted'}")
    with tempfile.TemporaryDirectory(prefix="tiny-model-") as directory:
        shape = {"head_dim": 128, "hidden_size": 256, "attention_head_dim": 64} if on_gpu else {}
        dtype = "bfloat16" if on_gpu else "float32"
        write_tiny_model(directory, options.architecture, dtype=dtype, **shape)
        try:
            off, on = run_both(console, directory, options, on_gpu)
        except EngineFailure as failure:
            console.print(str(failure), markup=False, highlight=False)
            return 1
    console.print(comparison(off, on))
    console.print(summary(off, on))
    for reason in (on.replayssm or {}).get("reasons", []):
        console.print(f"ReplaySSM was not active: {reason}")
    equal = off.tokens() == on.tokens()
    if not equal and on_gpu:
        console.print("bf16 on a GPU: tokens may differ where two candidates are a rounding error apart.")
    return 0 if equal or on_gpu else 1


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run_both(console: Console, model: str, options: argparse.Namespace, on_gpu: bool) -> list[EngineResult]:
    """The same prompts with the flag off, then on."""
    arguments, env = (GPU_ARGUMENTS, {}) if on_gpu else cpu_settings()
    flag = {"enable_gdn_replayssm_spec": True, "gdn_replayssm_fold": options.fold}
    batches = [Batch([prompt], options.tokens) for prompt in PROMPTS]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    results = []
    with Progress(*columns, console=console) as progress:
        for name, extra in (("ReplaySSM off", {}), ("ReplaySSM on", flag)):
            task = progress.add_task(f"{name}: starting the engine", total=len(batches) + 1)

            def step(what: str, task=task, name=name) -> None:
                done = 0 if what == "started" else int(what.split()[-1])
                state = "done" if done == len(batches) else f"prompt {done + 1} of {len(batches)}"
                progress.update(task, description=f"{name}: {state}", completed=done + 1)

            results.append(
                run_engine(
                    model,
                    batches,
                    env=env,
                    timeout=options.timeout,
                    on_progress=step,
                    disable_radix_cache=True,
                    max_running_requests=4,
                    max_mamba_cache_size=8,
                    **arguments,
                    **NEXTN,
                    **extra,
                )
            )
            progress.update(task, description=f"{name}: done", completed=len(batches) + 1)
    return results


def cpu_settings() -> tuple[dict[str, Any], dict[str, str]]:
    from sglang_cpusim import engine_arguments, environment

    return engine_arguments(), environment()


def comparison(off: EngineResult, on: EngineResult) -> Table:
    """A row for each prompt."""
    table = Table(title="The same prompts, ReplaySSM off and on")
    for heading in ("prompt", "continuation", "tokens"):
        table.add_column(heading)
    for heading in ("acceptance length", "verify steps"):
        table.add_column(f"{heading}\noff → on", justify="right")
    for prompt, (stock,), (replay,) in zip(PROMPTS, off.batches, on.batches, strict=True):
        table.add_row(
            shorten(prompt),
            shorten(replay.tokens),
            verdict(stock, replay),
            f"{stock.acceptance_length:.2f} → {replay.acceptance_length:.2f}",
            f"{stock.verify_steps} → {replay.verify_steps}",
        )
    return table


def summary(off: EngineResult, on: EngineResult) -> Table:
    """What the plugin reports of itself."""
    report = on.replayssm or {}
    stock, ring = report.get("stock_scratch_bytes_per_request"), report.get("ring_bytes_per_request")
    table = Table(title="Cost", show_header=False)
    table.add_row("ReplaySSM active", {True: "yes", False: "no"}.get(report.get("active"), NOT_AVAILABLE))
    table.add_row("steps by accepted drafts 0, 1, 2, 3", ", ".join(map(str, on.histogram())))
    table.add_row("folds", number(report.get("folds")))
    table.add_row("verified rows", number(report.get("verify_rows")))
    table.add_row("scratch bytes per request, stock", number(stock))
    table.add_row("scratch bytes per request, ring", number(ring))
    if stock and ring:
        table.add_row("stock / ring", f"{stock / ring:.1f}x")
    return table


def verdict(stock: Output, replay: Output) -> str:
    if stock.tokens == replay.tokens:
        return f"[green]all {len(stock.tokens)} equal[/green]"
    pairs = enumerate(zip(stock.tokens, replay.tokens, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), min(len(stock.tokens), len(replay.tokens)))
    return f"[red]differ from token {position}[/red]"


def shorten(tokens: list[int], limit: int = 6) -> str:
    return " ".join(map(str, tokens[:limit])) + (" …" if len(tokens) > limit else "")


def number(value: int | None) -> str:
    return NOT_AVAILABLE if value is None else f"{value:,}"


if __name__ == "__main__":
    sys.exit(main())
