"""The convolution of windows and its rollback: against the plain version, one long convolution, and SGLang's kernel."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stock import load_pinned

from sglang_replayssm.kernels import Cursors, RingSpec, commit_conv, convolve, plan_window
from sglang_replayssm.kernels.conv import naive

stock_conv = load_pinned("layers/attention/mamba/causal_conv1d_triton.py")
LAYERS, WIDTH = 2, 4


class Requests:
    """Requests on scattered rows and slots, padding and graph capture behind them; both layers' states and windows."""

    def __init__(self, count=3, padding=2, dim=40, drafts=4, dtype=torch.float32, device="cpu", seed=0, width=WIDTH):
        self.random = torch.Generator(device).manual_seed(seed)
        self.device, self.dtype, self.dim, self.drafts, self.count = device, dtype, dim, drafts, count
        rows = count + 2
        self.cursors = Cursors.allocate(RingSpec(LAYERS, rows, 1, 1, 16, 16, 16, drafts, dtype), device)
        order = torch.randperm(rows, device=device, generator=self.random) + 1
        self.rows = torch.cat([order[:count], torch.zeros(padding, dtype=order.dtype, device=device)])
        self.slots = torch.full((count + padding,), -1, dtype=torch.int32, device=device)
        self.slots[:count] = order.flip(0)[:count]
        if padding:
            self.slots[-1] = 0  # as in graph capture
        self.state = self.normal(LAYERS, 2 * rows + 2, dim, width - 1)
        # Whatever no step has written must never be read.
        self.windows = torch.full((LAYERS, rows + 1, drafts, dim), float("nan"), dtype=dtype, device=device)
        self.weight, self.bias = self.normal(LAYERS, dim, width), self.normal(LAYERS, dim)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, generator=self.random).to(self.dtype)

    def inputs(self, T: int) -> torch.Tensor:
        """[LAYERS, B T, dim], tokens further apart than dim: a slice of a larger projection."""
        return self.normal(LAYERS, len(self.rows) * T, self.dim + 8)[..., : self.dim]

    def convolve(self, x: torch.Tensor, T: int, ops=None, activation="silu", bias=True) -> torch.Tensor:
        plan_window(self.cursors, self.rows, self.slots)
        function = (ops or SimpleNamespace(convolve=convolve)).convolve
        layers = [
            function(
                x[i],
                self.state[i],
                self.weight[i],
                self.bias[i] if bias else None,
                activation,
                self.windows[i],
                self.cursors,
                T,
            )
            for i in range(LAYERS)
        ]
        return torch.stack(layers)[:, : self.count * T]

    def draw(self, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, self.rows.shape, device=self.device, generator=self.random)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_kernels_equal_naive(data) -> None:
    drafts = data.draw(st.integers(1, 8))
    sizes = {
        "count": data.draw(st.integers(1, 3)),
        "padding": data.draw(st.integers(0, 2)),
        "dim": data.draw(st.sampled_from([1, 40, 300])),
        "drafts": drafts,
        "width": data.draw(st.integers(2, 5)),
        "dtype": data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "seed": data.draw(st.integers(0, 99)),
    }
    bias, activation = data.draw(st.booleans()), data.draw(st.sampled_from([None, "silu"]))
    ours, plain = Requests(**sizes), Requests(**sizes)
    for _ in range(3):
        T = data.draw(st.integers(1, drafts))
        x = ours.inputs(T)
        steps, track = ours.draw(-1, T - 1), ours.draw(-1, T - 1)
        spare = torch.arange(len(steps)) + len(ours.state[0]) - len(steps)
        spare[track % 2 == 1] = -1
        mine = ours.convolve(x, T, activation=activation, bias=bias)
        expected = plain.convolve(x, T, naive, activation=activation, bias=bias)
        tolerance = {"rtol": 8e-3, "atol": 1e-3} if x.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(mine, expected, **tolerance)
        torch.testing.assert_close(ours.windows, plain.windows, rtol=0, atol=0, equal_nan=True)
        commit_conv(ours.state, ours.windows, ours.cursors, steps, track, spare)
        naive.commit_conv(plain.state, plain.windows, plain.cursors, steps, track, spare)
        assert torch.equal(ours.state, plain.state)


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_windows_and_rollbacks_are_one_long_convolution(data) -> None:
    """Over accepted tokens only, rejected drafts leave no trace, nor do windows that were never committed."""
    r = Requests(seed=data.draw(st.integers(0, 99)))
    slots = r.slots[: r.count].long()
    history = [r.state[:, slot].transpose(1, 2) for slot in slots]  # [layers, tokens, dim]
    for _ in range(data.draw(st.integers(1, 6))):
        T = data.draw(st.integers(1, r.drafts))
        x, steps = r.inputs(T), r.draw(-1, T - 1)
        out = r.convolve(x, T)
        for n in range(r.count):
            window = x[:, n * T : (n + 1) * T]
            inputs = torch.cat([history[n][:, 1 - WIDTH :], window], 1).transpose(1, 2)
            for layer in range(LAYERS):
                conv = torch.nn.functional.conv1d(
                    inputs[layer][None], r.weight[layer][:, None], r.bias[layer], groups=r.dim
                )
                expected = torch.nn.functional.silu(conv)[0].T
                torch.testing.assert_close(out[layer, n * T : (n + 1) * T], expected, rtol=1e-4, atol=1e-5)
            history[n] = torch.cat([history[n], window[:, : steps[n] + 1]], 1)
        commit_conv(r.state, r.windows, r.cursors, steps)
        for n, slot in enumerate(slots):
            assert torch.equal(r.state[:, slot].transpose(1, 2), history[n][:, 1 - WIDTH :])


def test_other_slots_and_the_old_state_are_left_alone() -> None:
    r = Requests()
    before = r.state.clone()
    r.convolve(r.inputs(4), 4)
    assert torch.equal(r.state, before)
    commit_conv(r.state, r.windows, r.cursors, torch.full_like(r.rows, 2))
    changed = (r.state != before).flatten(2).any(2)
    live = torch.zeros_like(changed)
    live[:, r.slots[: r.count].long()] = True
    assert torch.equal(changed, live)
    assert r.windows[:, r.count :].isnan().all()  # padding and capture have written nothing


@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_tracked_state_is_the_one_before_the_commit(step: int) -> None:
    """Both come from the old state, whichever is written first."""
    r = Requests(count=1, padding=0)
    slot, spare = r.slots.long(), torch.zeros(1, dtype=torch.int64)
    inputs = r.inputs(4)
    history = torch.cat([r.state[:, slot[0]].transpose(1, 2), inputs], 1)
    r.convolve(inputs, 4)
    commit_conv(r.state, r.windows, r.cursors, torch.tensor([0]), torch.tensor([step]), spare)
    assert torch.equal(r.state[:, slot[0]].transpose(1, 2), history[:, 1:4])
    assert torch.equal(r.state[:, 0].transpose(1, 2), history[:, step + 1 : step + 4])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "gelu"}, "activations"),
        ({"state": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)}, "packed"),
        ({"state": lambda x: x[:, :-1]}, "state"),
        ({"weight": lambda x: x[:, 1:]}, "weights"),
        ({"windows": lambda x: x.double()}, "float64"),
        ({"windows": lambda x: x[:, :3]}, "room"),
        ({"x": lambda x: x.T.contiguous().T}, "adjacent"),
        ({"x": lambda x: x[:-1]}, "B x 4"),
    ],
)
def test_what_the_kernel_does_not_take_is_refused(change, words) -> None:
    r = Requests(dim=40)
    plan_window(r.cursors, r.rows, r.slots)
    arguments = {
        "x": torch.randn(len(r.rows) * 4, 40),
        "state": r.state[0],
        "weight": r.weight[0],
        "bias": None,
        "activation": "silu",
        "windows": r.windows[0],
        "cursors": r.cursors,
        "draft_tokens": 4,
    }
    for name, new in change.items():
        arguments[name] = new(arguments[name]) if callable(new) else new
    with pytest.raises(ValueError, match=words):
        convolve(**arguments)


def test_commit_refuses_windows_of_other_layers() -> None:
    r = Requests()
    with pytest.raises(ValueError, match="layers"):
        commit_conv(r.state, r.windows[:1], r.cursors, torch.zeros_like(r.rows))


def stock_convolve(x, state, weight, bias, activation, windows, cursors, draft_tokens):
    """SGLang's kernel, which writes its states into copies that nobody looks at."""
    batch, width = len(x) // draft_tokens, weight.shape[1]
    states = x.new_empty(batch, draft_tokens, x.shape[1], width - 1)
    slots = torch.where(cursors.plan[:batch, 1] > 0, cursors.plan[:batch, 0], -1)
    out = stock_conv.causal_conv1d_update(
        x.view(batch, draft_tokens, -1).transpose(1, 2),
        state.clone(),
        weight,
        bias,
        activation,
        conv_state_indices=slots,
        intermediate_conv_window=states,
        intermediate_state_indices=torch.arange(batch, dtype=torch.int32, device=x.device),
    )
    return out.transpose(1, 2).reshape(x.shape)


STOCK = SimpleNamespace(convolve=stock_convolve)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("T", [1, 4])
def test_outputs_are_sglang_s_bit_for_bit(T: int, bias: bool, device: str) -> None:
    """Interpreted in fp32, since the interpreter does not round bf16 as hardware does."""
    r = Requests(dim=300, device=device)
    x = r.inputs(T)
    assert torch.equal(r.convolve(x, T, bias=bias), r.convolve(x, T, STOCK, bias=bias))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("T", [1, 2, 4, 8, 16])
def test_compiled_outputs_are_sglang_s_bit_for_bit(T: int, dtype: torch.dtype) -> None:
    r = Requests(count=40, padding=3, dim=8192, drafts=16, dtype=dtype, device="cuda")
    x = r.inputs(T)
    for bias in (True, False):
        ours = r.convolve(x, T, bias=bias)
        assert ours.isfinite().all() and torch.equal(ours, r.convolve(x, T, STOCK, bias=bias))
    plain = Requests(count=40, padding=3, dim=8192, drafts=16, dtype=dtype, device="cuda")
    plain.windows.copy_(r.windows)
    plan_window(plain.cursors, plain.rows, plain.slots)
    steps = r.draw(-1, T - 1)
    commit_conv(r.state, r.windows, r.cursors, steps)
    naive.commit_conv(plain.state, plain.windows, plain.cursors, steps)
    assert torch.equal(r.state, plain.state)
