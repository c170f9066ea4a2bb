"""The benchmark's own parts, without a GPU: byte model, statistics, oracle, adapters, a session with fake times."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(Path(__file__).resolve().parent)]

from bench import check, oracle, peers, registry, report, stats, traffic  # noqa: E402
from bench.session import Options, Session  # noqa: E402
from bench.shape import Shape, acceptance_table, make_inputs  # noqa: E402
from bench.variant import NotApplicable, Setup, Variant  # noqa: E402

CPU = torch.device("cpu")
FULL = Shape(64, 4, 16, 32)
TINY = Shape(2, 4, 1, 2, head_dim=32)

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
fetched = pytest.mark.skipif(not (peers.PEERS / "sglang").exists(), reason="run scripts/fetch_peers.py")


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_quantiles():
    assert stats.summary([4.0, 1.0, 2.0, 3.0]) == {
        "median": 2.5,
        "p25": 1.75,
        "p75": 3.25,
        "min": 1.0,
        "max": 4.0,
        "repetitions": 4,
    }
    assert stats.quantile([5.0], 0.25) == 5.0


def test_simulated_cursors():
    """W=8, T=4 by hand: the row holds 0, 3, 6 (folds), 3, 6 (folds) records at its verifies."""
    cycle = traffic.simulate([[3]] * 5, traffic.FoldRule(limit=4), skip=0)
    assert cycle == traffic.Cycle(fold_rate=2 / 5, history=18 / 5, folded=6.0, accepted=3.0)
    in_commit = traffic.simulate([[3]] * 4, traffic.FoldRule(limit=4, in_commit=True), skip=0)
    assert in_commit == traffic.Cycle(fold_rate=0.5, history=1.5, folded=6.0, accepted=3.0)


def test_byte_model_against_hand_counts():
    """32/16 heads of 128: 2 MiB of state, 96.5 KiB of activations at T=4."""
    assert traffic.state_bytes(FULL) == 2 * 2**20
    assert traffic.activation_bytes(FULL) == 96.5 * 1024
    assert traffic.record_bytes(FULL, per_v=4, per_k=2, per_head=8) == 32 * 520 + 16 * 256
    cycle = traffic.Cycle(fold_rate=0.2, history=6.0, folded=14.0, accepted=3.0)
    bytes_of = {name: v.traffic(_bare(v), cycle) / 1e6 for name, v in registry.VARIANTS.items()}
    assert bytes_of["stock"] == pytest.approx(14.78, abs=0.01)
    assert bytes_of["sglang-0.5.23-every-commit"] == pytest.approx(6.49, abs=0.02)
    assert bytes_of["replayssm"] == pytest.approx(2.097 * 1.2 + 0.0207 * 10 + 0.099, abs=0.01)
    compact = registry.VARIANTS["sglang-0.5.23-compact"]
    often = traffic.Cycle(fold_rate=1 / 3, history=4.0, folded=11.0, accepted=3.0)
    assert compact.traffic(_bare(compact), often) / 1e6 == pytest.approx(3.86, abs=0.06)


def _bare(factory):
    """An instance with a shape and no buffers."""
    variant = object.__new__(factory)
    variant.shape, variant.length = FULL, 16
    return variant


def test_oracle_precisions():
    generator = torch.Generator().manual_seed(0)
    inputs = make_inputs(TINY, generator)
    assert inputs.q.stride(0) == (1 + 1 + 2) * 32, "q, k, v are slices of one buffer"
    rows = torch.arange(TINY.batch)
    state = torch.randn(TINY.batch, *TINY.state_shape, generator=generator).double()
    exact, states = oracle.recurrence(state, inputs, rows, TINY.batch, torch.float64)
    single, _ = oracle.recurrence(state, inputs, rows, TINY.batch, torch.float32)
    assert exact.shape == (2, 4, 2, 32) and states.shape == (2, 4, 2, 32, 32)
    error = oracle.RelativeError()
    assert error.value is None
    error.add(single, exact)
    assert 1e-9 < error.value < 1e-6


def test_acceptance_covers_every_length():
    table = acceptance_table(200, TINY, torch.Generator().manual_seed(0))
    assert table.dtype == torch.int32 and table.unique().tolist() == [1, 2, 3, 4]


def test_setup_scatters_rows_and_shares_pools():
    setup = Setup(Shape(5, 4, 1, 2, 16), layers=2, capacity=9, device=CPU)
    for index in (setup.rows, setup.slots):
        assert len(index.unique()) == 5 and index.min() >= 1 and index.max() <= 9
    assert setup.state() is setup.state()
    assert torch.equal(setup.state(torch.bfloat16), setup.state().bfloat16())
    setup.set_accepted(torch.tensor([1, 2, 3, 4, 1], dtype=torch.int32))
    assert setup.last_step.tolist() == [0, 1, 2, 3, 0]


def errors_of(name: str, monkeypatch, steps: int = 6) -> check.Errors:
    import interpreted as interpreter

    interpreter.patch_dot(monkeypatch)
    factory = registry.VARIANTS[name]
    setup = Setup(TINY, 1, 3, CPU, window=8, fp32_output=factory.output_before_cast)
    try:
        variant = factory(setup)
    except NotApplicable as reason:
        pytest.skip(str(reason))
    if name == "stock":  # its commit refuses CPU tensors
        monkeypatch.setattr(variant, "_scatter", scatter_in_torch)
    return check.run(variant, check.trace(TINY, variant.state[0], setup.slots, steps, factory.packed_inputs))


def scatter_in_torch(state, snapshots, slots, steps):
    state[:, slots.long()] = snapshots[:, torch.arange(len(slots)), steps.long()]


@interpreted
@fetched
@pytest.mark.parametrize("name", ["stock", "sglang-0.5.16-ring", "sglang-0.5.23-compact"])
def test_peers_are_called_correctly(name, monkeypatch):
    errors = errors_of(name, monkeypatch)
    assert errors.output < registry.VARIANTS[name].tolerance and errors.before_cast
    assert errors.folds > 0 and errors.state < registry.VARIANTS[name].tolerance


@interpreted
def test_ours_is_called_correctly(monkeypatch):
    errors = errors_of("replayssm-triton", monkeypatch)
    assert errors.folds > 0 and errors.output < 1e-6 and errors.state < 1e-6


@interpreted
@pytest.mark.parametrize("name", ["replayssm-exact", "replayssm-every-commit", "replayssm-bf16"])
def test_fold_policies_are_called_correctly(name, monkeypatch):
    errors, tolerance = errors_of(name, monkeypatch), registry.VARIANTS[name].tolerance
    assert errors.folds > 0 and errors.output < tolerance and errors.state < tolerance


class FakeTimer:
    """Instead of a GPU: runs the steps it would capture, and makes up times."""

    def __init__(self) -> None:
        self.device, self.skip, self.calls = CPU, 2, []

    def capture(self, variant, inputs):
        return object()

    def measure(self, variant, graph, table) -> float:
        self.calls.append(variant.name)
        return 10.0 + len(self.calls)


class Exact(Variant):
    """A variant by the oracle's own recurrence, in fp32."""

    name = "exact"
    folds_before_window = False

    def verify(self, layer, inputs):
        rows = torch.arange(self.shape.batch)
        state = self.state[layer][self.setup.slots.long()]
        outputs, self.after = oracle.recurrence(state, inputs, rows, self.shape.batch, torch.float32)
        return outputs.flatten(0, 1)

    def commit(self):
        each = torch.arange(self.shape.batch)
        self.state[0, self.setup.slots.long()] = self.after[each, self.setup.last_step.long()]

    def traffic(self, cycle):
        return 1e6


class Wrong(Exact):
    name = "wrong"

    def verify(self, layer, inputs):
        return super().verify(layer, inputs) * 1.1


class Broken(Exact):
    name = "broken"

    def verify(self, layer, inputs):
        raise RuntimeError("no such instruction")


def test_session_goes_on_past_failures(monkeypatch):
    monkeypatch.setattr(registry, "VARIANTS", {v.name: v for v in (Exact, Wrong, Broken)})
    timer = FakeTimer()
    options = Options(layers=1, steps=6, skip=2, repetitions=4, capacity=3, window=8)
    session = Session(options, timer, bandwidth=4e12, log=print)
    results = session.measure(TINY, ["wrong", "exact", "broken"])
    reasons = {r["variant"]: r.get("reason") for r in results}
    assert reasons["wrong"].startswith("fails the oracle: relative error 1.0e-01")
    assert reasons["broken"] == "RuntimeError: no such instruction"
    (timed,) = [r for r in results if "us" in r]
    assert timed["us"]["repetitions"] == 4 and timed["cycle"]["fold_rate"] > 0
    assert timed["achieved_bytes_per_s"] == pytest.approx(1e6 * 2 / (timed["us"]["median"] * 1e-6))
    json.dumps(results)
    console = report.wide_console()
    console.print(report.times_table("t", results, "exact"), report.matrix_table("m", results, [2]))


def test_arguments_of_bench_verify():
    module = script("bench_verify")
    args = module.parser().parse_args(["--variants", "stock,sglang-0.5.23", "--heads", "32/16,8/4", "--T", "2,8"])
    assert args.heads == [(32, 16), (8, 4)] and args.T == [2, 8] and args.batches == module.BATCHES
    assert "stock" in args.variants and "sglang-0.5.23-compact-tuned" in args.variants
    assert "sglang-0.5.16-ring" not in args.variants
    for bad in (["--variants", "none-such"], ["--heads", "3/2"]):
        with pytest.raises(SystemExit):
            module.parser().parse_args(bad)


def test_files_kept_of_a_wheel():
    wanted = script("fetch_peers").wanted
    keep = ("flashinfer/gdn_kernels/[!_]*.py", "!flashinfer/gdn_kernels/*/*")
    assert wanted("flashinfer/gdn_kernels/gdn_decode_mtp.py", keep)
    assert not wanted("flashinfer/gdn_kernels/__init__.py", keep)
    assert not wanted("flashinfer/gdn_kernels/blackwell/gdn.py", keep)
