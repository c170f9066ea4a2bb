"""`sglang-replayssm plan`: the memory of a server, stock and with the ring side by side, told without a GPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_replayssm.checkpoint import weight_bytes
from sglang_replayssm.plugin import seams

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

    from sglang_replayssm.plugin.solver import Gpu

GIB = 1 << 30
# GiB that a CUDA context, the driver and communication buffers may take before weights are loaded: an estimate.
BEFORE_LOAD = 1.0
DESCRIPTION = """\
What a server with these arguments allocates, by SGLang's own memory solver, without a GPU. Figures are of one GPU and
agree with the server's log. Every option that is not listed here goes to SGLang's parser as it is, --config files
included: --tp, --mem-fraction-static, --max-running-requests, --disable-radix-cache, --speculative-num-draft-tokens,
--gdn-replayssm-cache-len, --gdn-replayssm-fold, ... The default is NEXTN with 4 draft tokens. Exit status 1 if the ring
would not be used."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a server's command line does not say."""
    parser.add_argument(
        "--model", "--model-path", metavar="DIR", type=Path, required=True, help="folder with the model's config.json"
    )
    parser.add_argument("--gpu-memory", metavar="GIB", type=_positive, required=True, help="memory of one GPU")
    parser.add_argument(
        "--free-gb",
        metavar="GIB",
        type=_positive,
        help="free memory before weights are loaded; only a GPU can tell: `Load weight begin. avail mem` in a server's "
        f"log (default: --gpu-memory less {BEFORE_LOAD:g})",
    )
    parser.add_argument(
        "--weights-gb",
        metavar="GIB",
        type=_positive,
        help="weights on one GPU, target and draft: the sum of `mem usage` in `Load weight end` (default: the tensors "
        "of DIR's safetensors files or index and the draft's own embedding and head, divided by --tp)",
    )
    parser.add_argument(
        "--request-tokens",
        metavar="N",
        type=_tokens,
        default=768,
        help="length of a request, prompt and answer, also as 256+512 (default: 768)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, all sizes in bytes")


def run(options: argparse.Namespace, server_options: list[str]) -> int:
    """Print the plan; 1 if there is none, or none for the ring, with the reason."""
    try:
        plan = make(options, server_options)
    except (ValueError, RuntimeError) as error:
        print(f"no plan: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(plan, indent=2))
    else:
        _print_table(plan)
    return int(plan["ring"] is None)


def make(options: argparse.Namespace, server_options: list[str]) -> dict[str, Any]:
    """The plan as JSON values: assumptions, the columns `stock` and `ring`, and in `problems` why a column is None.

    Raises:
        ValueError: nothing to plan from, or SGLang refuses the arguments; the message says what to do.
        RuntimeError: another SGLang than the pinned one.
    """
    if not (options.model / "config.json").is_file():
        raise ValueError(
            f"{options.model} holds no config.json; plan looks nothing up: give the folder of a downloaded model, or "
            "one that holds its config.json alone"
        )
    if not options.weights_gb:
        _checkpoint_bytes(options.model)  # what is missing is said at once
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if "torch" not in sys.modules:  # a GPU that is here by chance is not the one that is planned for
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with _silence():
        return _solve(options, server_options)


def _checkpoint_bytes(directory: Path) -> int:
    found = weight_bytes(directory)
    if found is None:
        raise ValueError(
            f"{directory} holds neither safetensors files nor their index: give --weights-gb, the GiB of weights on "
            "one GPU, target and draft"
        )
    return found


def _solve(options: argparse.Namespace, server_options: list[str]) -> dict[str, Any]:
    try:
        from sglang_replayssm.plugin import solver
    except ImportError as error:
        raise ValueError(f"{error}; plan runs SGLang's own code: pip install sglang=={seams.PINNED_SGLANG}") from error
    seams.raise_on_mismatch()

    args = solver.server_args(["--model-path", str(options.model), *server_options], options.gpu_memory)
    if problem := solver.why_no_plan(args):
        raise ValueError(problem)
    weights = options.weights_gb
    if not weights:
        whole = _checkpoint_bytes(options.model) + solver.draft_copies(args)
        if args.speculative_draft_model_path not in (None, args.model_path):
            whole += _checkpoint_bytes(Path(args.speculative_draft_model_path))
        weights = whole / GIB / args.tp_size
    gpu = solver.Gpu(before_load=options.free_gb or options.gpu_memory - BEFORE_LOAD, weights=weights)
    problems: dict[str, list[str]] = {"stock": [], "ring": solver.why_no_ring(args)}
    columns: dict[str, dict[str, Any] | None] = dict.fromkeys(problems)
    for name, reasons in problems.items():
        if not reasons:
            try:
                columns[name] = _column(args, gpu, name == "ring", options.request_tokens)
            except ValueError as error:  # one of the two may fit where the other does not
                reasons.append(str(error))
    if columns["stock"] is columns["ring"]:
        raise ValueError("; ".join(dict.fromkeys(problems["stock"] + problems["ring"])))
    return {
        "model": str(options.model),
        "tp_size": args.tp_size,
        "gpu_gib": options.gpu_memory,
        "free_before_load_gib": gpu.before_load,
        "weights_gib": gpu.weights,
        "weights_from": "--weights-gb" if options.weights_gb else "the checkpoint, evenly over the GPUs",
        "mem_fraction_static": args.mem_fraction_static,
        "request_tokens": options.request_tokens,
        **columns,
        "problems": problems,
    }


def _column(args: ServerArgs, gpu: Gpu, ring: bool, tokens: int) -> dict[str, Any]:
    from sglang_replayssm.plugin import solver

    pools = solver.pools(args, gpu, ring)
    return asdict(pools) | {
        "scratch": pools.scratch,
        "kv": pools.kv,
        "concurrent": solver.concurrent(args, pools, tokens),
        "best_max_running_requests": solver.best_max_running_requests(args, gpu, ring, tokens),
    }


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """SGLang logs as if it were starting, and its imports complain of the missing GPU."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _print_table(plan: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = {"stock": plan["stock"], "ring": plan["ring"]}
    table = Table(title=f"Memory of one GPU in GiB (--tp {plan['tp_size']})", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for title, key, show in _rows(plan["request_tokens"]):
        table.add_row(title, *("-" if column is None else show(column[key]) for column in columns.values()))
    Console().print(table)
    print(*_notes(plan), sep="\n")


def _rows(tokens: int) -> list[tuple[str, str, Callable[[int], str]]]:
    """Title, key and format of each line."""
    return [
        ("state (checkpoints)", "state", _gib),
        ("scratch", "scratch", _gib),
        ("  state copies (intermediate_ssm)", "snapshots", _gib),
        ("  conv windows", "windows", _gib),
        ("  ring", "ring", _gib),
        ("  cursors and step plan", "cursors", _gib),
        ("KV cache", "kv", _gib),
        ("  of the draft layer", "kv_draft", _gib),
        ("left for activations and CUDA graphs", "reserve", _gib),
        ("KV cache, tokens", "kv_tokens", _count),
        ("requests that the pool admits", "requests", _count),
        (f"requests of {tokens} tokens at once, none retracted", "concurrent", _count),
        ("the same with the best --max-running-requests", "best_max_running_requests", _count),
    ]


def _notes(plan: dict[str, Any]) -> list[str]:
    notes = [
        f"Assumed: {plan['free_before_load_gib']:.2f} GiB free before weights are loaded, "
        f"{plan['weights_gib']:.2f} GiB of weights ({plan['weights_from']}), "
        f"--mem-fraction-static {plan['mem_fraction_static']:.4g}.",
        "Not known without a GPU: what CUDA context, activations, CUDA graphs and workspaces take.",
    ]
    if any(plan[name] and not plan[name]["kv_draft_budgeted"] for name in plan["problems"]):
        notes.append(
            "SGLang sets the draft layer's KV cache aside only with --speculative-draft-model-path; here it comes out "
            "of what is left."
        )
    notes += [
        f"{name} does not start like this: what is left is below 0, so lower --mem-fraction-static."
        for name in plan["problems"]
        if plan[name] and plan[name]["reserve"] < 0
    ]
    return notes + [f"No column for {name}: {'; '.join(found)}" for name, found in plan["problems"].items() if found]


def _gib(value: int) -> str:
    return f"{value / GIB:.2f}"


def _count(value: int) -> str:
    return f"{value:,}"


def _positive(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _tokens(text: str) -> int:
    value = sum(int(part) for part in text.split("+"))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value
