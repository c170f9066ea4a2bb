"""Bit-identity on the GPU, as far as a machine without one can see it: what the compiler makes of SGLang's kernel and
of ours for an H200.

Sums depend on which elements a thread holds and on which products become fused multiply-adds, and both are the
compiler's choice. Equal layouts of every reduction and equal counts of every instruction say that it chose alike, at
SGLang's width of a tile. At the narrower ones that we use, K must lie in the lanes as it does there, and every column
must cost the same instructions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STOCK, VERIFY, REPLAY = "fused_sigmoid_gating_delta_rule_update_kernel", "_verify_recurrent", "replay_rows"
SIZES = [(128, "bfloat16"), (64, "float16")]  # head size K = V, activation dtype
WIDTHS = (32, 16, 8)  # columns of a tile, the first as in SGLang's kernel
Compiled = dict[str, dict[str, str]]  # kernel -> {"ttgir": ..., "ptx": ...}


@pytest.fixture(scope="module", params=SIZES, ids=str)
def widths(request, tmp_path_factory) -> dict[int, Compiled]:
    """What the compiler makes of the kernels at every width."""
    pytest.importorskip("sglang", reason="compares with SGLang's kernel")
    return {width: compile_apart(tmp_path_factory.mktemp("compiled"), *request.param, width) for width in WIDTHS}


@pytest.fixture(scope="module")
def compiled(widths) -> Compiled:
    return widths[WIDTHS[0]]


def compile_apart(dump: Path, size: int, dtype_name: str, width: int) -> Compiled:
    """`compile_all` in a process of its own, which is not interpreted."""
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_KERNEL_DUMP": "1",
        "TRITON_DUMP_DIR": str(dump / "dump"),
        "TRITON_CACHE_DIR": str(dump / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, __file__, str(size), dtype_name, str(width)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: {stage: next(dump.glob(f"dump/*/{name}.{stage}")).read_text() for stage in ("ttgir", "ptx")}
        for name in (STOCK, VERIFY, REPLAY)
    }


def reductions(ttgir: str) -> Counter:
    """Operand type of every reduction, with its layout spelled out."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.M))
    operands = re.findall(r"\}\) : \((tensor<.*?>)\) -> ", ttgir)
    return Counter(re.sub(r"#(?!ttg)\w+", lambda name: layouts[name[0]], operand) for operand in operands)


def instructions(ptx: str, *names: str) -> Counter:
    found = re.findall(rf"^\s+(?:@!?%p\d+ )?((?:{'|'.join(names)})\.[\w.]+)", ptx, re.M)
    return Counter(name for name in found if "f32" in name or name.startswith("shfl"))


SUMS = ("fma", "add", "sub", "shfl", "sqrt", "ex2", "lg2")


def test_recurrent_verify(compiled) -> None:
    """Multiplications and divisions differ by those of SGLang's softplus_beta, which is 1."""
    stock, ours = compiled[STOCK], compiled[VERIFY]
    assert sum(reductions(stock["ttgir"]).values()) == 4  # |q|, |k|, S k, S q
    assert reductions(ours["ttgir"]) == reductions(stock["ttgir"])
    assert instructions(ours["ptx"], *SUMS) == instructions(stock["ptx"], *SUMS)
    extra = instructions(stock["ptx"], "mul", "div") - instructions(ours["ptx"], "mul", "div")
    assert extra == Counter({"mul.f32": 2, "div.full.f32": 1})


def test_replay(compiled) -> None:
    """Half of the reductions, |k| and S k, in the same layouts, and no product fused that is not fused in SGLang's."""
    stock, ours = compiled[STOCK], compiled[REPLAY]
    assert reductions(ours["ttgir"]) + reductions(ours["ttgir"]) == reductions(stock["ttgir"])
    sums = "shfl", "sqrt"
    assert instructions(ours["ptx"], *sums) + instructions(ours["ptx"], *sums) == instructions(stock["ptx"], *sums)
    # SGLang's sums: S k and S q, |k| and |q|, equally many fused products each; beside them the rank-1 update.
    (fused, both), update = (instructions(k["ptx"], "fma")["fma.rn.f32"] for k in (ours, stock)), elements(ours)
    assert both - update == 2 * (fused - update)


@pytest.mark.parametrize("kernel", [VERIFY, REPLAY])
def test_narrow_tiles(widths, kernel: str) -> None:
    """One warp with K over the lanes as at SGLang's width, and columns that do not touch each other's instructions."""

    def without_columns(width: int) -> Counter:
        return Counter(re.sub(rf"x{width}xf32", "xf32", kind) for kind in reductions(widths[width][kernel]["ttgir"]))

    def counts(width: int) -> Counter:
        return instructions(widths[width][kernel]["ptx"], *SUMS)

    wide, middle, narrow = WIDTHS
    assert without_columns(wide) == without_columns(middle) == without_columns(narrow)
    assert counts(wide) - counts(middle) == Counter({k: 2 * n for k, n in (counts(middle) - counts(narrow)).items()})


def elements(kernel: dict[str, str]) -> int:
    """Elements of the state tile that a thread holds."""
    rows, columns = re.search(r"tensor<(\d+)x(\d+)xf32, #", kernel["ttgir"]).groups()
    return int(rows) * int(columns) // 32


def compile_all(size: int, dtype_name: str, width: int) -> None:
    """Launch nothing, compile everything, with `width` columns a tile."""
    import importlib

    import compile_offline
    import torch
    import triton
    from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import fused_sigmoid_gating_delta_rule_update

    triton.runtime.driver.set_active(compile_offline.OfflineDriver())
    for module in ("verify.recurrent", "fold.triton"):
        importlib.import_module(f"sglang_replayssm.kernels.{module}").tile_columns = lambda *_: width
    case = compile_offline.Case(getattr(torch, dtype_name), 4, size, batch=4, window=16, fold="every-commit")
    case.verify()
    case.fold_due()
    index = torch.arange(5, dtype=torch.int32)
    fused_sigmoid_gating_delta_rule_update(
        A_log=case.A_log,
        a=case.a,
        dt_bias=case.dt_bias,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        q=case.q[None],
        k=case.k[None],
        v=case.v[None],
        b=case.b,
        initial_state_source=case.state[0],
        initial_state_indices=index[:4],
        cu_seqlens=4 * index,
        use_qk_l2norm_in_kernel=True,
        disable_state_update=True,
        intermediate_states_buffer=torch.empty(4, 4, *case.state.shape[2:]),
        intermediate_state_indices=index[:4],
        cache_steps=4,
    )


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
