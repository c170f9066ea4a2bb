"""The fidelity study: its recurrence, statistics and scenarios, a small run, and that broken policies are found out."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from fidelity import methods, verdict  # noqa: E402
from fidelity.methods import Sequential  # noqa: E402
from fidelity.scenarios import REGIMES, Inputs, largest_inverse_entry, scenarios  # noqa: E402
from fidelity.study import Size, Study  # noqa: E402
from fidelity.sums import Sums  # noqa: E402
from fidelity.verdict import Series, checks, series  # noqa: E402

from sglang_replayssm.kernels.fold import naive as naive_fold  # noqa: E402
from sglang_replayssm.kernels.recurrence import recurrence  # noqa: E402

CPU = torch.device("cpu")
DIM = 16


def make_inputs(T: int = 4, rows: int = 6) -> Inputs:
    torch.manual_seed(0)
    return Inputs(scenarios(rows), list(REGIMES), T, DIM, CPU)


def study(policies: list[str], tokens: int = 256, T: int = 4, rows: int = 3, regimes=REGIMES):
    torch.manual_seed(1)
    size = Size(tokens, tokens // 4, T, DIM, naive=True)
    return Study(size, scenarios(rows), list(regimes), policies, CPU).run(seconds=60)


def failed(measured, method: str) -> set[str]:
    return {check.what for check in checks(measured) if check.method == method and not check.passed}


# ---------------------------------------------------------------------------------------------------------- statistics


def test_sums_go_to_the_bin_of_each_row_and_past_the_end_to_none():
    sums = Sums(["x", "y"], bins=2, batch=2, heads=1, device=CPU)
    ones = torch.ones(2, 1)
    sums.add(torch.tensor([0, 1]), {"x": ones, "y": 2 * ones})
    sums.add(torch.tensor([0, 7]), {"x": ones, "y": 2 * ones})
    assert sums.by_name(2)["x"].squeeze(-1).tolist() == [[2, 0], [0, 1]]
    assert sums.by_name(1)["y"].squeeze(-1).tolist() == [[4, 0]]


def test_statistics_of_known_errors():
    """Relative errors of 3e-7, and twice that from the second half on; the yardstick's is 2e-7 throughout."""
    norm = torch.tensor([1.0, 1e6]).double().expand(8, 2)[..., None]  # rows of any size weigh the same
    error = (3e-7) ** 2 * norm * torch.tensor([1, 1, 1, 1, 4, 4, 4, 4.0]).double()[:, None, None]
    s = Series(error, norm, (2e-7) ** 2 * norm)
    assert s.curve()[0].item() == pytest.approx(3e-7)
    assert s.overall().item() == pytest.approx(3e-7 * math.sqrt(2.5))
    assert s.ratio().item() == pytest.approx(1.5 * math.sqrt(2.5))
    assert s.worst_ratio().item() == pytest.approx(3.0) and s.worst_window().item() == pytest.approx(3.0)
    assert s.growth().item() == pytest.approx(2.0)
    assert s.yardstick_growth().item() == pytest.approx(1.0)


def test_a_lucky_yardstick_in_one_scenario_does_not_make_a_window():
    """Where the yardstick of one of two rows is 10 times better than usual, the ratio of that cell is 10."""
    norm = torch.ones(4, 2, 1).double()
    yardstick = norm.clone()
    yardstick[2, 1] = 0.01
    s = Series(norm, norm, yardstick)
    assert s.worst_ratio().item() == pytest.approx(10)
    assert s.worst_window().item() == pytest.approx(math.sqrt(2 / 1.01))


def test_windows_without_a_fold_are_left_out_and_nan_is_not():
    norm = torch.ones(4, 2, 1).double()
    error = 4 * norm
    norm[1, 0], error[1, 0] = 0, 0
    s = Series(error, norm, norm)
    assert s.curve().flatten().tolist() == [2, 2, 2, 2]
    assert s.worst_ratio().item() == s.worst_window().item() == 2
    error[2, 1] = math.nan
    assert s.ratio().isnan() and s.worst_ratio().isnan() and s.worst_window().isnan()
    check = verdict._worst("m", "what", torch.tensor([1.0, math.nan]), torch.tensor([2.0, 2.0]), ["a", "b"])
    assert check.regime == "b" and not check.passed


# ----------------------------------------------------------------------------------------------------- what is compared


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_recurrence_is_that_of_the_package(dtype: torch.dtype):
    inputs = make_inputs()
    method = Sequential("x", torch.randn(6, len(REGIMES), DIM, DIM, dtype=dtype))
    for _ in range(3):
        inputs.draw()
        tokens = [x.view(6, 4, *x.shape[1:]) for x in (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b)]
        expected = recurrence(*tokens, inputs.A_log, inputs.dt_bias, method.state, dtype)
        method.verify(inputs)
        method.commit(inputs)
        assert torch.equal(method.out, expected.out)
        assert torch.equal(method.state, expected.states[torch.arange(6), inputs.accepted - 1])


def test_rounded_state_fits_bf16():
    inputs = make_inputs()
    inputs.draw()
    method = Sequential("x", torch.randn(6, len(REGIMES), DIM, DIM), rounded=torch.bfloat16)
    method.verify(inputs)
    method.commit(inputs)
    assert torch.equal(method.state, method.state.bfloat16().float())


def test_scenarios_are_what_they_are_called():
    inputs = make_inputs(rows=24)
    assert len(set(inputs.rows)) == 24
    accepted, cosines, betas = [], [], []
    for _ in range(50):
        inputs.draw()
        accepted.append(inputs.accepted.clone())
        k = torch.nn.functional.normalize(inputs.k.view(24, 4, -1, DIM).float(), dim=-1)
        cosines.append((k[:, 0] * k[:, 3]).sum(-1).abs().mean(-1))
        betas.append(torch.sigmoid(inputs.b.float()).view(24, -1).mean(-1))
    accepted, cosine, beta = torch.stack(accepted).double(), torch.stack(cosines).mean(0), torch.stack(betas).mean(0)
    assert accepted.min() == 1 and accepted.max() == 4
    for i, row in enumerate(inputs.rows):
        assert (cosine[i] > 0.99) == (row.keys != "random")
        assert (beta[i] > 0.99) == (row.beta == "near 1")
        assert (accepted[:, i].mean() > 3.2) == (row.acceptance == "bursts")


def test_inverse_of_the_window_is_bounded_and_found():
    inputs = make_inputs()
    inputs.draw()
    assert (largest_inverse_entry(inputs) <= 1 + 1e-12).all()
    inputs.k.copy_(inputs.k[:1].expand_as(inputs.k))
    inputs.b.fill_(20)
    assert largest_inverse_entry(inputs)[:, 0].min() > 0.99  # -1 below the diagonal


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize("T", [4, 8])
def test_policies_are_as_accurate_as_the_recurrence(T: int):
    """Of the bars, those that a few tokens can show; the others are for long runs."""
    measured = study(["fp32", "exact", "every-commit", "bf16"], T=T)
    assert measured.tokens == 256
    by_name = {method.name: method for method in measured.methods}
    for name in ("fp32", "exact", "every-commit"):
        for what in ("out", "state"):
            assert (series(measured, by_name[name], what).ratio() < 1.8).all(), (name, what)
    assert (series(measured, by_name["bf16"], "state").ratio() > 1e3).all()
    assert not any(check.method == "bf16" for check in checks(measured))


def test_every_commit_replays_the_reference_state():
    measured = study(["every-commit"], rows=2)
    ratio = series(measured, measured.methods[-1], "state").ratio()
    assert ((ratio > 0.8) & (ratio < 1.25)).all()


def without_low_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors that lost all but their leading bf16 part."""
    original = naive_fold.with_factors

    def broken(state, ring, row, base, count, dtype):
        at = (base + torch.arange(count)) % ring.spec.records
        ring.d[row][:, at] = ring.d[row][:, at].bfloat16().float()
        return original(state, ring, row, base, count, dtype)

    monkeypatch.setattr(naive_fold, "with_factors", broken)


def with_wrong_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decay of the checkpoint forgets the last token."""
    original = naive_fold.with_factors

    def broken(state, ring, row, base, count, dtype):
        last = ring.g[row, :, (base + count - 1) % ring.spec.records, 0] / count
        return original(state * torch.exp(-last)[:, None, None], ring, row, base, count, dtype)

    monkeypatch.setattr(naive_fold, "with_factors", broken)


@pytest.mark.parametrize("break_it", [without_low_part, with_wrong_weight])
def test_a_broken_fold_fails(break_it, monkeypatch: pytest.MonkeyPatch):
    break_it(monkeypatch)
    measured = study(["fp32"], tokens=128, rows=2)
    found = failed(measured, "fp32")
    assert {"out: overall / stock fp32", "state: overall / stock fp32"} <= found
    assert {"state: any window", "state: any window and scenario"} <= found


@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)], ids=["one scenario", "all scenarios"])
def test_one_window_at_two_and_a_half_times_the_yardstick_fails(rows: slice):
    """Elsewhere the error is half of it, so that no other bar of the outputs takes notice."""
    measured = study(["fp32"])
    yardstick = measured.sums["stock fp32: out"]
    measured.sums["fp32: out"] = error = 0.25 * yardstick
    error[0, rows] = 6.25 * yardstick[0, rows]
    found = {what for what in failed(measured, "fp32") if what.startswith("out: any window")}
    assert "out: any window and scenario" in found
    assert rows != slice(None) or "out: any window" in found


def test_a_broken_replay_fails_and_so_does_nan(monkeypatch: pytest.MonkeyPatch):
    original = naive_fold.replayed
    monkeypatch.setattr(naive_fold, "replayed", lambda *args: original(*args) * (1 + 1e-6))
    assert "state: error equal" in failed(study(["exact"], tokens=128, rows=2), "exact")
    monkeypatch.setattr(naive_fold, "replayed", lambda *args: original(*args) * math.nan)
    found = failed(study(["exact"], tokens=128, rows=2), "exact")
    assert {"out: overall / stock fp32", "state: overall / stock fp32", "state: any window and scenario"} <= found
    assert "state: any window" in found


@pytest.mark.skipif(torch.cuda.is_available(), reason="--naive is for machines without a GPU")
def test_script_writes_what_it_covered(tmp_path: Path, capsys: pytest.CaptureFixture):
    spec = importlib.util.spec_from_file_location("study_fidelity", SCRIPTS / "study_fidelity.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    status = script.main(
        ["--naive", "--tokens=64", "--rows=2", "--regimes=2", "--head-dim=16", "--T=4", f"--out={tmp_path}"]
    )
    (path,) = tmp_path.glob("*.json")
    report = json.loads(path.read_text())
    (result,) = report["results"]
    assert result["tokens"] == 64 and len(result["scenarios"]) == 2
    assert status == (0 if result["passed"] else 1)
    assert len(result["methods"]["fp32"]["state"]["curve"]["none"]) == 8
    assert len(list(tmp_path.glob("*.png"))) == 2
    assert ("PASS" if result["passed"] else "FAIL") in capsys.readouterr().out
    assert str(tmp_path) not in path.read_text().replace(report["environment"]["command"], "")


def test_budget_stops_at_whole_windows():
    size = Size(10**6, 4, 4, DIM, naive=True)
    torch.manual_seed(2)
    measured = Study(size, scenarios(2), list(REGIMES[:2]), ["every-commit"], CPU).run(seconds=0.5)
    assert 4 <= measured.tokens < 10**6
    assert len(measured.sums["out norm"]) == measured.tokens // 4
    assert (measured.sums["out norm"] > 0).all()


def test_a_step_neither_waits_for_the_device_nor_touches_the_host():
    """What graph capture needs, shown on fake CUDA tensors: reading one back raises, a CPU operand is seen."""
    on_host: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
            if any(x.device.type == "cpu" for x in tensors):
                on_host.append(str(function))
            return result

    with FakeTensorMode():
        size = Size(4096, 1024, 4, DIM, naive=True)
        whole = Study(size, scenarios(4), list(REGIMES), [], torch.device("cuda"))
        with Watch():
            whole.step()
    assert not on_host


def test_kernels_of_the_server_run_in_the_study(device: str):
    """The same loop with the real kernels: on a GPU as a captured graph, else in the interpreter for a few steps."""
    gpu = device == "cuda"
    size = Size(64 if gpu else 4, 16 if gpu else 4, 4, 128 if gpu else 32, naive=False)
    torch.manual_seed(3)
    inputs_rows, regimes = scenarios(2), list(REGIMES[2:4])
    measured = Study(size, inputs_rows, regimes, ["fp32", "exact", "every-commit"], torch.device(device)).run(60)
    by_name = {method.name: method for method in measured.methods}
    every = by_name["every-commit"]
    assert every.yardstick is not by_name["stock fp32"]
    for name in ("fp32", "exact", "every-commit"):
        assert (series(measured, by_name[name], "out").overall() < 1e-5).all()
    if every.yardstick.name == methods.STOCK_KERNEL:
        for what in ("state", "out"):
            assert measured.sums[f"every-commit: differing {what}"].sum() == 0
    assert methods.TRITON is not methods.NAIVE
