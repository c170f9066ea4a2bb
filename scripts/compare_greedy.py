"""Greedy text with the ring on against off, on the GPU: every first difference must be a near tie.

    python scripts/compare_greedy.py --out results
    python scripts/compare_greedy.py --out results --fold fp32 exact every-commit --tokens 512

Stock runs the prompts in one batch, twice, and some one at a time, where it takes other matrix kernels: that shows
how far apart candidates are where stock flips against itself. Under a fold policy whose outputs are bit-identical,
every difference is a mismatch where stock in one batch equals itself. Prints a table of the gaps and writes
compare_greedy.json; exit status 1 on a mismatch.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engine"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from engine_harness import NEXTN, Batch, run_engine
from evaluation.near_ties import FLIP_FACTOR, first_differences

from sglang_replayssm.policies import POLICIES
from sglang_replayssm.tiny import ARCHITECTURES, ZERO_LOGIT_TOKEN, write_tiny_model

# Heads and hidden size of Qwen3.5-35B-A3B: matrices large enough that cuBLAS takes other kernels for other batches.
SHAPE = {
    "head_dim": 128,
    "num_k_heads": 16,
    "num_v_heads": 32,
    "hidden_size": 2048,
    "attention_head_dim": 128,
    "num_attention_heads": 16,
    "num_layers": 8,
}
CANDIDATES = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="qwen3_next")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--fold", choices=POLICIES, nargs="+", default=["fp32"], help="fold policies of the ring")
    parser.add_argument("--singles", type=int, default=64, help="prompts that stock also runs one at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=280, help="seconds that one engine may take")
    parser.add_argument("--out", type=Path, default=Path("results"))
    options = parser.parse_args()

    rng = random.Random(options.seed)
    prompts = [[rng.randrange(5, 480) for _ in range(rng.randrange(4, 48))] for _ in range(options.prompts)]
    whole = Batch(prompts, options.tokens, top_logprobs=CANDIDATES, probe=ZERO_LOGIT_TOKEN)
    singles = [Batch([prompt], options.tokens) for prompt in prompts[: options.singles]]
    arguments = NEXTN | {
        "dtype": "bfloat16",
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "moe_runner_backend": "triton",
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.3,
        "max_running_requests": 2 * options.prompts,
        "cuda_graph_backend_prefill": "disabled",
        "disable_radix_cache": True,
        "timeout": options.timeout,
    }
    if options.architecture == "qwen3_5":
        arguments["enable_multimodal"] = False

    with tempfile.TemporaryDirectory(prefix="tiny-model-") as directory:
        write_tiny_model(directory, options.architecture, dtype="bfloat16", **SHAPE)
        # One after the other: SGLang measures the GPU's free memory while it starts.
        off = run_engine(directory, [whole, whole, *singles], **arguments)
        stock, again, alone = off.batches[0], off.batches[1], [batch[0] for batch in off.batches[2:]]
        flips = first_differences(stock[: len(alone)], alone)
        largest = max((d.gap for d in flips), default=0.0)
        steady = [a.tokens == b.tokens for a, b in zip(stock, again, strict=True)]
        result = {
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "prompts": options.prompts,
            "tokens": options.tokens,
            "acceptance_length": _acceptance(stock),
            "equal_to_itself_in_one_batch": sum(steady),
            "alone": len(alone),
            "flips_alone": [asdict(d) for d in flips],
            "fold": {},
        }
        for fold in options.fold:
            flags = {"enable_gdn_replayssm_spec": True, "gdn_replayssm_fold": fold}
            on = run_engine(directory, [whole], **flags, **arguments)
            differences = first_differences(stock, on.batches[0])
            must_equal = POLICIES[fold].factors is None
            result["fold"][fold] = {
                "ring": on.replayssm,
                "acceptance_length": _acceptance(on.batches[0]),
                "differences": [asdict(d) for d in differences],
                "mismatches": sum((must_equal and steady[d.prompt]) or not d.is_near_tie(largest) for d in differences),
            }
            options.out.mkdir(parents=True, exist_ok=True)
            (options.out / "compare_greedy.json").write_text(json.dumps(result, indent=1))
            _print(result, largest)

    inactive = [fold for fold, found in result["fold"].items() if not (found["ring"] or {}).get("active")]
    if inactive:
        print(f"the ring was not active under {', '.join(inactive)}")
    return 1 if inactive or any(found["mismatches"] for found in result["fold"].values()) else 0


def _acceptance(outputs) -> float:
    return sum(len(o.tokens) - 1 for o in outputs) / max(1, sum(o.verify_steps for o in outputs))


def _print(result: dict, largest: float) -> None:
    table = Table(title=f"first differences, {result['prompts']} prompts x {result['tokens']} tokens, greedy")
    for column in ("comparison", "equal", "differ", "largest gap", "median gap", "mismatches"):
        table.add_column(column, justify="right")
    rows = [("stock, one at a time", result["alone"], result["flips_alone"], "-")]
    for fold, found in result["fold"].items():
        rows.append((f"{fold} against stock", result["prompts"], found["differences"], str(found["mismatches"])))
    for name, compared, differences, mismatches in rows:
        gaps = sorted(d["gap"] for d in differences)
        middle = f"{gaps[len(gaps) // 2]:.4f}" if gaps else "-"
        top = f"{gaps[-1]:.4f}" if gaps else "-"
        table.add_row(name, str(compared - len(gaps)), str(len(gaps)), top, middle, mismatches)
    Console().print(table)
    print(f"bound: {FLIP_FACTOR:g} x {largest:.4f} or 2 bf16 ulps of the top logit")
    print(f"stock equals itself in one fixed batch: {result['equal_to_itself_in_one_batch']}/{result['prompts']}")
    print(f"acceptance length, stock: {result['acceptance_length']:.3f}")
    for fold, found in result["fold"].items():
        print(f"acceptance length, {fold}: {found['acceptance_length']:.3f}, ring: {found['ring']}")


if __name__ == "__main__":
    sys.exit(main())
