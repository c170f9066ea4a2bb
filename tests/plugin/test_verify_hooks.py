"""The verify hooks on SGLang's real pool and GDN backend, against an fp64 recurrence over the accepted tokens."""

from __future__ import annotations

import functools
import inspect
import sys
from types import SimpleNamespace

import pytest
import torch
from test_memory import CONV, HV, LAYERS, H, K, V, server_args
from triton.compiler.errors import CompilationError

from sglang_replayssm import kernels
from sglang_replayssm.kernels.recurrence import recurrence
from sglang_replayssm.kernels.ring import WRITE_POS
from sglang_replayssm.plugin import donation, launch, memory, rows, verify
from sglang_replayssm.plugin.pool import ring_of

T_MAX, WINDOW, ROWS, SLOTS = 4, 8, 4, 12
PREFILL = 10  # tokens of a new request
INTERVAL = 6  # at which states are tracked for the prefix cache, if they are


@pytest.fixture(params=["fp32"])
def server(request, make_server):
    """See `make_server`; the parameter is the fold policy."""
    return make_server(request.param)


@pytest.fixture
def make_server(monkeypatch):
    """SGLang's pool and backend with our hooks, three GDN layers, and the fp64 truth of every request row."""
    return lambda fold, **options: build_server(monkeypatch, fold, **options)


def build_server(monkeypatch, fold: str, extra_buffer: bool = False, **settings) -> Server:
    """`settings`: further fields of the server's arguments."""
    from sglang.srt import server_args as module
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
    from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
    from sglang.srt.speculative import spec_utils

    torch.manual_seed(0)
    args = server_args(T_MAX, WINDOW, fold, disable_radix_cache=False, mamba_track_interval=INTERVAL, **settings)
    args.enable_mamba_extra_buffer = lambda: extra_buffer
    args.get_model_config = lambda: SimpleNamespace(dtype=torch.float32)
    monkeypatch.setattr(module, "get_global_server_args", lambda: args)
    monkeypatch.setattr(spec_utils, "get_global_server_args", lambda: args)
    stock = MambaPool.__init__
    monkeypatch.setattr(MambaPool, "__init__", lambda self, **kw: memory.init_mamba_pool(stock, self, **kw))
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=HV * V,
        n_groups=H,
        num_heads=HV,
        head_dim=V,
        state_size=K,
        conv_kernel=CONV,
    )
    params = Mamba2CacheParams(
        shape=shape, layers=LAYERS, dtype=Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    )
    pool = HybridReqToTokenPool(
        size=ROWS,
        mamba_size=SLOTS,
        mamba_spec_state_size=ROWS,
        max_context_len=64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=params,
        mamba_layer_ids=LAYERS,
        enable_mamba_extra_buffer=extra_buffer,
        speculative_num_draft_tokens=T_MAX,
        speculative_eagle_topk=1,
        enable_overlap_schedule=False,
    )
    runner = SimpleNamespace(
        device="cpu",
        server_args=SimpleNamespace(speculative_eagle_topk=1, enable_unified_memory=False),
        is_draft_worker=False,
        req_to_token_pool=pool,
        token_to_kv_pool=None,
    )
    dim = shape.conv[0][0]
    layers = [
        RadixLinearAttention(
            layer,
            H,
            H,
            HV,
            K,
            K,
            V,
            conv_weights=torch.randn(dim, CONV),
            bias=None,
            activation="silu",
            A_log=torch.rand(HV).mul(4).log(),
            dt_bias=torch.linspace(-8, 1, HV),
        )
        for layer in LAYERS
    ]
    for tensor in (pool.mamba_pool.mamba_cache.temporal, pool.mamba_pool.mamba_cache.conv[0]):
        tensor.normal_()
    return Server(pool, GDNAttnBackend(runner), runner, layers, dim)


class Server:
    """A little scheduler around the hooks: rows are given, windows verified and committed; truth goes along in fp64."""

    def __init__(self, pool, backend, runner, layers, dim):
        self.pool, self.backend, self.runner, self.layers, self.dim = pool, backend, runner, layers, dim
        self.ring = ring_of(pool)
        self.state, self.conv = {}, {}
        self.length, self.req = {}, {}
        self.tracked = {}  # row -> (tokens, slot, state, conv) of the last track interval that it has crossed

    def admit(self) -> int:
        """A new request: stock allocation through our hook, then its (already computed) prefill."""
        req = SimpleNamespace(
            mamba_pool_idx=None,
            req_pool_idx=None,
            mamba_ping_pong_track_buffer=None,
            kv_committed_len=0,
            mamba_next_track_idx=None,
            is_chunked=0,
            inflight_middle_chunks=0,
        )
        (row,) = rows.alloc(type(self.pool).alloc, self.pool, [req])
        self.extend(row)
        cache = self.pool.mamba_pool.mamba_cache
        slot = int(self.pool.get_mamba_indices(torch.tensor([row]))[0])
        cache.temporal[:, slot].normal_()
        self.state[row], self.conv[row] = cache.temporal[:, slot].double(), cache.conv[0][:, slot].clone()
        self.length[row], self.req[row] = PREFILL, req
        return row

    def extend(self, *batch: int) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        forward_batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND, req_pool_indices=torch.tensor(batch, dtype=torch.int64)
        )
        rows.before_extend(lambda *_: None, self.runner, forward_batch)

    def step(self, batch: list[int], accepted: list[int], drafts: int = T_MAX, padding: int = 0) -> None:
        """Verify one window a row (and `padding` dummy rows), check every layer's output, commit `accepted`."""
        forward_batch = self.forward_batch(batch + [0] * padding, drafts)
        slots = self.backend.forward_metadata.mamba_cache_indices
        if padding:
            slots[-padding:] = -1
        outputs, tokens = [], (len(batch) + padding) * drafts
        for layer, truth_index in zip(self.layers, range(len(self.layers)), strict=True):
            x, a, b = torch.randn(tokens, self.dim), torch.randn(tokens, HV), torch.randn(tokens, HV)
            out = verify.forward_extend(
                None, self.backend, layer=layer, forward_batch=forward_batch, mixed_qkv=x, a=a, b=b
            )
            assert out.shape == (1, tokens, HV, V)
            outputs.append(out)
            assert not out[0, len(batch) * drafts :].any()  # padding rows
            self.check_layer(truth_index, layer, batch, accepted, drafts, x, a, b, out[0])
        self.commit(batch, accepted, drafts, forward_batch)

    def check_layer(self, index, layer, batch, accepted, drafts, x, a, b, out):
        for n, (row, keep) in enumerate(zip(batch, accepted, strict=True)):
            window = slice(n * drafts, (n + 1) * drafts)
            history = torch.cat([self.conv[row][index], x[window].T], -1)
            qkv = torch.nn.functional.conv1d(history[None], layer.conv_weights[:, None], groups=self.dim)[0].T
            q, k, v = torch.nn.functional.silu(qkv).split([H * K, H * K, HV * V], -1)
            truth = recurrence(
                q.view(1, drafts, H, K),
                k.view(1, drafts, H, K),
                v.view(1, drafts, HV, V),
                a[None, window],
                b[None, window],
                layer.A_log,
                layer.dt_bias,
                self.state[row][index][None],
            )
            if self.ring.spec.fold != "bf16":  # whose error is its point
                torch.testing.assert_close(out[window].double(), truth.out[0], rtol=1e-4, atol=1e-5)
            self.state[row][index] = truth.states[0, keep - 1]
            self.conv[row][index] = history[:, keep : keep + CONV - 1]
            boundary = (self.length[row] + keep) // INTERVAL * INTERVAL
            if self.pool.enable_mamba_extra_buffer and boundary > self.length[row]:
                step = boundary - self.length[row]
                if index == 0:
                    slot = self.req[row].mamba_ping_pong_track_buffer[0]
                    state, conv = torch.empty_like(self.state[row]), torch.empty_like(self.conv[row])
                    self.tracked[row] = (boundary, int(slot), state, conv)
                self.tracked[row][2][index] = truth.states[0, step - 1]
                self.tracked[row][3][index] = history[:, step : step + CONV - 1]

    def forward_batch(self, batch: list[int], drafts: int):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        tokens = len(batch) * drafts
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(batch),
            input_ids=torch.zeros(tokens, dtype=torch.long),
            req_pool_indices=torch.tensor(batch, dtype=torch.int64),
            seq_lens=torch.tensor([self.length.get(row, 1) for row in batch]),
            out_cache_loc=torch.arange(tokens),
            seq_lens_sum=sum(self.length.get(row, 1) for row in batch),
        )
        forward_batch.spec_info = SimpleNamespace(
            draft_token_num=drafts, retrieve_next_token=None, retrieve_next_sibling=None, is_verify_input=lambda: True
        )
        self.backend.init_forward_metadata(forward_batch)
        return forward_batch

    def commit(self, batch, accepted, drafts, forward_batch) -> None:
        """SGLang's own commit function around ours, as its EAGLE worker calls it."""
        from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
        from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify

        class Hybrid(HybridLinearAttnBackend):
            def update_mamba_state_after_mtp_verify(self, **kwargs):
                verify.update_mamba_state_after_mtp_verify(None, self, **kwargs)

        hybrid = object.__new__(Hybrid)
        hybrid.linear_attn_backend = self.backend
        model_runner = SimpleNamespace(
            mambaish_config=object(), attn_backend=hybrid, model=None, req_to_token_pool=self.pool
        )
        scheduled = SimpleNamespace(
            forward_mode=forward_batch.forward_mode,
            mamba_track_indices=self.track_slots(batch),
            seq_lens=forward_batch.seq_lens[: len(batch)],
            req_pool_indices=torch.tensor(batch, dtype=torch.int64),
        )
        index = torch.arange(drafts) + drafts * torch.arange(len(batch))[:, None]
        lengths = torch.tensor(accepted, dtype=torch.int32)
        verify.commit_mamba_states_after_verify(
            commit_mamba_states_after_verify,
            SimpleNamespace(model_runner=model_runner),
            scheduled,
            lengths,
            index.masked_fill(torch.arange(drafts) >= lengths[:, None], -1),
            drafts,
        )
        for row, keep in zip(batch, accepted, strict=True):
            self.length[row] += keep

    def track_slots(self, batch) -> torch.Tensor | None:
        """What SGLang makes `ScheduleBatch.mamba_track_indices`, here always the first slot of the buffer."""
        if not self.pool.enable_mamba_extra_buffer:
            return None
        return torch.stack([self.req[row].mamba_ping_pong_track_buffer[0] for row in batch])

    def truth(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 state and conv state of the row after all its tokens, to keep."""
        return self.state[row].clone(), self.conv[row].clone()

    def assert_state(self, row: int) -> None:
        """After a fold the slot holds the truth, and the conv state always does."""
        self.extend(row)
        slot = int(self.pool.get_mamba_indices(torch.tensor([row]))[0])
        cache = self.pool.mamba_pool.mamba_cache
        torch.testing.assert_close(cache.temporal[:, slot].double(), self.state[row], rtol=1e-4, atol=1e-5)
        assert torch.equal(cache.conv[0][:, slot], self.conv[row])
        assert int(self.ring.cursors.position[row, WRITE_POS]) == 0


@pytest.mark.parametrize("server", ["fp32", "exact", "every-commit"], indirect=True)
def test_life_cycle_with_padding_changing_drafts_and_reuse(server):
    """Traps 2, 3, 5 and 6 through SGLang's own metadata, conv and commit."""
    first, second = server.admit(), server.admit()
    server.step([first, second], [4, 1])
    server.step([second, first], [3, 2], padding=2)
    server.step([first, second], [2, 1], drafts=2)
    server.step([first, second], [1, 1], drafts=1)
    server.step([first], [4])
    folds = int(server.ring.cursors.counters[server.ring.cursors.COUNTERS.index("folds")])
    assert folds > 0
    server.assert_state(first)
    server.assert_state(second)

    server.pool.free(SimpleNamespace(req_pool_idx=second))
    for tensor in server.ring.ring.tensors().values():
        tensor[:, second] = float("nan")
    third = server.admit()
    server.step([third, first], [4, 4])
    server.step([third], [3])
    server.assert_state(third)


def test_a_rank_without_rows(server):
    """Trap 4: a data-parallel rank that is not idle but has no rows."""
    forward_batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: True), spec_info=SimpleNamespace(draft_token_num=T_MAX)
    )
    out = verify.forward_extend(
        None,
        server.backend,
        layer=server.layers[0],
        forward_batch=forward_batch,
        mixed_qkv=torch.empty(0, server.dim),
        a=torch.empty(0, HV),
        b=torch.empty(0, HV),
    )
    assert out.shape == (1, 0, HV, V)


def test_an_idle_batch_commits_nothing(server):
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: True))
    worker = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=server.pool))
    called = []
    verify.commit_mamba_states_after_verify(
        lambda *args: called.append(args), worker, batch, torch.empty(0), torch.empty(0, T_MAX), T_MAX
    )
    assert called and not server.ring.cursors.position.any()


def test_other_extends_and_pools_without_a_ring_are_stock(server):
    mode = SimpleNamespace(is_target_verify=lambda: False)
    stock = lambda self, **kwargs: kwargs  # noqa: E731
    kwargs = {"layer": 1, "forward_batch": SimpleNamespace(forward_mode=mode), "mixed_qkv": 2, "a": 3, "b": 4, "q": 5}
    assert verify.forward_extend(stock, server.backend, **kwargs) == kwargs
    no_ring = SimpleNamespace(req_to_token_pool=SimpleNamespace(mamba_pool=object()))
    assert verify.forward_extend(stock, no_ring, **kwargs) == kwargs
    assert verify.forward_decode(lambda self, *args: args, no_ring, 7) == (7,)


def test_a_plain_decode_is_refused(server):
    with pytest.raises(RuntimeError, match="would lose them"):
        verify.forward_decode(None, server.backend)


class Uncompilable:
    """A Triton kernel whose launch ends in the compiler's error."""

    def __getitem__(self, grid):
        raise CompilationError("", None, "no such layout")


def test_a_verify_kernel_that_does_not_compile_ends_the_step(server, monkeypatch):
    """One error that says which kernel and what to do, the compiler's behind it; no token is accepted."""
    row = server.admit()
    monkeypatch.setattr(sys.modules["sglang_replayssm.kernels.verify.triton"], "_verify", Uncompilable())
    words = r"the kernel `verify` \(portable Triton, T=4, fold=fp32, W=8\) does not compile or launch"
    with pytest.raises(RuntimeError, match=words) as caught:
        server.step([row], [T_MAX])
    assert isinstance(caught.value.__cause__, CompilationError) and "Start without the flag" in str(caught.value)
    assert int(server.ring.cursors.position[row, WRITE_POS]) == 0


@pytest.mark.parametrize("name", launch.__all__)
def test_every_kernel_that_the_hooks_launch_is_named_in_its_failure(server, name):
    def broken(*args, **kwargs):
        raise failure

    explained = launch.explained(functools.wraps(getattr(kernels, name))(broken))
    arguments = dict.fromkeys(inspect.signature(getattr(kernels, name)).parameters)
    arguments |= {"cursors": server.ring.cursors} | ({"draft_tokens": 3} if name == "verify" else {})
    failure = CompilationError("", None, "no such layout")
    with pytest.raises(RuntimeError, match=rf"the kernel `{name}` \(.*fold=fp32, W=8\).*CompilationError") as caught:
        explained(**arguments)
    assert caught.value.__cause__ is failure
    failure = torch.OutOfMemoryError("not the compiler's")
    with pytest.raises(torch.OutOfMemoryError, match="not the compiler's"):
        explained(**arguments)
    for module in (verify, rows, donation):
        assert getattr(module, name, getattr(launch, name)) is getattr(launch, name), "launched past the explanation"
