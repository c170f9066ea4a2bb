from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_replayssm.plugin import memory
from sglang_replayssm.plugin.pool import ring_of
from sglang_replayssm.policies import POLICIES

H, HV, K, V, CONV, LAYERS = 2, 4, 32, 32, 4, [0, 1, 2]


def cache_params(state=torch.float32):
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=HV * V,
        n_groups=H,
        num_heads=HV,
        head_dim=V,
        state_size=K,
        conv_kernel=CONV,
    )
    return Mamba2CacheParams(shape=shape, layers=LAYERS, dtype=Mamba2StateDType(conv=torch.bfloat16, temporal=state))


def server_args(drafts: int = 4, window: int = 16, fold: str = "fp32", **kwargs):
    return SimpleNamespace(
        speculative_num_draft_tokens=drafts,
        max_speculative_num_draft_tokens=drafts,
        gdn_replayssm_cache_len=window,
        gdn_replayssm_fold=fold,
        get_model_config=lambda: SimpleNamespace(dtype=torch.bfloat16),
        enable_dp_attention=False,
        dp_size=1,
        **kwargs,
    )


@pytest.fixture
def build_pool(monkeypatch):
    """A real MambaPool built through our hook, on the CPU."""
    from sglang.srt import server_args as module
    from sglang.srt.mem_cache.memory_pool import MambaPool

    def build(slots=8, rows=4, drafts=4, window=16, state=torch.float32, fold="fp32", **kwargs):
        args = server_args(drafts, window, fold)
        monkeypatch.setattr(module, "get_global_server_args", lambda: args)
        pool = object.__new__(MambaPool)
        memory.init_mamba_pool(
            MambaPool.__init__,
            pool,
            size=slots,
            spec_state_size=rows,
            cache_params=cache_params(state),
            mamba_layer_ids=LAYERS,
            device="cpu",
            **({"speculative_num_draft_tokens": drafts, "speculative_eagle_topk": 1} | kwargs),
        )
        return pool

    return build


def tensors_of(pool) -> dict[int, torch.Tensor]:
    """Every distinct storage that the pool keeps, by address."""
    ring = ring_of(SimpleNamespace(mamba_pool=pool))
    cache = pool.mamba_cache
    tensors = [*cache.conv, cache.temporal, *pool._intermediate_conv_window_phys]
    tensors += ring.ring.tensors().values()
    tensors += [ring.cursors.position, ring.cursors.plan, ring.cursors.counters]
    return {t.untyped_storage().data_ptr(): t for t in tensors}


def test_the_snapshots_are_never_allocated(build_pool, monkeypatch):
    """Not even for a moment: allocate-then-free can run out of memory."""
    shapes = []
    zeros = torch.zeros

    def recording_zeros(*args, **kwargs):
        shapes.append(zeros(*args, **(kwargs | {"device": "meta"})).shape)
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", recording_zeros)
    pool = build_pool(drafts=5)
    assert pool.mamba_cache.intermediate_ssm is None
    assert (len(LAYERS), 8 + 1, HV, V, K) in shapes  # the state is seen
    assert (len(LAYERS), 4 + 1, 5, HV, V, K) not in shapes


def test_layer_view_and_all_layers_view_have_no_snapshots(build_pool):
    pool = build_pool()
    assert pool.mamba2_layer_cache(1).intermediate_ssm is None
    assert pool.get_speculative_mamba2_params_all_layers().intermediate_ssm is None


def test_conv_windows_hold_the_inputs_of_a_window(build_pool):
    """One vector a draft token, less than the conv states that the pin keeps."""
    drafts, rows = 4, 4
    ((dim, width),) = cache_params().shape.conv
    pool = build_pool(rows=rows, drafts=drafts)
    (windows,) = pool.mamba_cache.intermediate_conv_window
    assert windows.shape == (len(LAYERS), rows + 1, drafts, dim)
    assert pool.mamba2_layer_cache(1).intermediate_conv_window[0].shape == windows.shape[1:]
    per_row = windows[:, 0].numel() * windows.element_size()
    assert per_row == memory.window_bytes_per_row(cache_params(), len(LAYERS), drafts)
    stock = memory.stock_scratch_bytes_per_row(cache_params(), len(LAYERS), drafts)
    states = len(LAYERS) * drafts * HV * V * K * pool.mamba_cache.temporal.element_size()
    assert (stock - states) * drafts == per_row * (drafts + width - 1)


def test_without_speculation_the_pool_is_stock(build_pool):
    pool = build_pool(speculative_num_draft_tokens=None)
    assert ring_of(SimpleNamespace(mamba_pool=pool)) is None
    assert type(pool.mamba_cache).__name__ == "State"


def test_a_state_of_another_dtype_is_refused(build_pool):
    with pytest.raises(RuntimeError, match="float32"):
        build_pool(state=torch.bfloat16)


def test_ring_is_not_registered_for_rdma(build_pool):
    pool = build_pool()
    addresses, _, _ = pool.get_contiguous_buf_infos()
    ring = ring_of(SimpleNamespace(mamba_pool=pool)).ring
    for tensor in ring.tensors().values():
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        assert not any(first <= address < last for address in addresses)
    assert len(addresses) == 2 * len(LAYERS)  # conv and temporal of every layer, as stock


def test_mem_usage_is_what_is_allocated(build_pool):
    pool = build_pool()
    assert pool.mem_usage * memory.GIB == sum(t.untyped_storage().nbytes() for t in tensors_of(pool).values())


def runner(args, params):
    """What the solver reads of a ModelRunner."""
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin as Mixin

    fake = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        server_args=args,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        start_layer=0,
        end_layer=100,
        dtype=torch.bfloat16,
        dp_size=1,
    )
    fake._calculate_mamba_ratio = lambda: Mixin._calculate_mamba_ratio(fake)
    return fake


def solve(args, params, gib: float) -> tuple[float, int]:
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin as Mixin

    left = memory.handle_max_mamba_cache(Mixin.handle_max_mamba_cache, runner(args, params), gib)
    return left, args.max_mamba_cache_size


BRANCHES = {
    "explicit size": {"max_mamba_cache_size": 40, "disable_radix_cache": True, "max_running_requests": 40},
    "max running requests": {"max_mamba_cache_size": None, "disable_radix_cache": True, "max_running_requests": 24},
    "ratio": {"max_mamba_cache_size": None, "disable_radix_cache": False, "max_running_requests": 9},
    "ratio, all slots used": {"max_mamba_cache_size": None, "disable_radix_cache": False, "max_running_requests": 900},
    "explicit size, prefix cache": {
        "max_mamba_cache_size": 40,
        "disable_radix_cache": False,
        "max_running_requests": 40,
    },
}
# Slots of extra_buffer beyond no_buffer's three a request: (overlap scheduling, additional slots).
EXTRA_BUFFER = {"no_buffer": None, "extra_buffer": (True, 2), "extra_buffer without overlap": (False, 1)}


def set_strategy(args, strategy: str) -> int:
    """Make the arguments those of a mamba strategy; returns its slots a request."""
    overlap, additional = EXTRA_BUFFER[strategy] or (False, 0)
    args.disable_overlap_schedule = not overlap
    args.enable_mamba_extra_buffer = lambda: additional > 0
    args.enable_mamba_extra_buffer_lazy = lambda: False
    return 1 if args.disable_radix_cache else 3 + additional


@pytest.mark.parametrize("fold", POLICIES)
@pytest.mark.parametrize(
    ("branch", "strategy"),
    [
        (branch, strategy)
        for branch, settings in BRANCHES.items()
        for strategy in (["no_buffer"] if settings["disable_radix_cache"] else EXTRA_BUFFER)
    ],
)
@pytest.mark.parametrize(("drafts", "window"), [(2, 16), (4, 16), (8, 24)])
def test_reserved_bytes_are_allocated_bytes(build_pool, branch, strategy, drafts, window, fold):
    """Trap 13, in every branch of the stock solver: state, ring, windows and cursors including the +1 rows."""
    args = server_args(drafts, window, fold, mamba_full_memory_ratio=0.9, **BRANCHES[branch])
    ratio = set_strategy(args, strategy)
    params, gib = cache_params(), 0.25
    left, slots = solve(args, params, gib)
    rows = min(args.max_running_requests, slots // ratio)
    pool = build_pool(slots=slots, rows=rows, drafts=drafts, window=window, fold=fold)
    allocated = sum(t.untyped_storage().nbytes() for t in tensors_of(pool).values())
    assert (gib - left) * memory.GIB == pytest.approx(allocated, abs=1024)
    assert args.speculative_num_draft_tokens == drafts  # put back


@pytest.mark.parametrize(
    ("fold", "buffers", "records"),
    [
        ("fp32", {"k": torch.bfloat16, "d": torch.float32, "g": torch.float32}, 16 + 4),
        (
            "exact",
            {
                "k": torch.bfloat16,
                "d": torch.float32,
                "g": torch.float32,
                "v": torch.bfloat16,
                "gates": torch.float32,
            },
            16,
        ),
        ("every-commit", {"k": torch.bfloat16, "v": torch.bfloat16, "gates": torch.float32}, 4),
        ("bf16", {"k": torch.bfloat16, "d": torch.bfloat16, "g": torch.float32}, 16 + 4),
    ],
)
def test_a_policy_gets_only_the_buffers_that_it_needs(build_pool, fold, buffers, records):
    pool = ring_of(SimpleNamespace(mamba_pool=build_pool(fold=fold)))
    assert {name: tensor.dtype for name, tensor in pool.ring.tensors().items()} == buffers
    assert {tensor.shape[3] for tensor in pool.ring.tensors().values()} == {records}
    rows = pool.spec.rows + 1
    assert sum(tensor.nbytes for tensor in pool.ring.tensors().values()) == rows * pool.spec.bytes_per_row


def test_freed_memory_becomes_requests_or_kv_cache():
    """At one budget the ring leaves more for the KV cache (fixed requests) and fits more requests (ratio)."""
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin as Mixin

    for branch in ("max running requests", "ratio"):
        results = []
        for ours in (False, True):
            args = server_args(mamba_full_memory_ratio=0.9, **(BRANCHES[branch] | {"max_running_requests": 30}))
            args.enable_mamba_extra_buffer = lambda: False
            if ours:
                results.append(solve(args, cache_params(), 0.25))
            else:
                left = Mixin.handle_max_mamba_cache(runner(args, cache_params()), 0.25)
                results.append((left, args.max_mamba_cache_size))
        (stock_left, stock_slots), (left, slots) = results
        assert slots > stock_slots if branch == "ratio" else left > stock_left


def test_without_speculation_the_solver_is_stock():
    args = server_args(drafts=None)
    assert memory.handle_max_mamba_cache(lambda self, gib: gib - 1, runner(args, cache_params()), 7.0) == 6.0


def test_the_log_says_what_was_reserved_and_what_a_later_cap_leaves(build_pool, caplog, monkeypatch):
    """Fewer rows than the solver planned for (capped by tokens): reserved stays above allocated; the log says so."""
    monkeypatch.setattr(memory, "reserved_bytes", None)
    args = server_args(mamba_full_memory_ratio=0.9, **(BRANCHES["max running requests"] | {"max_running_requests": 64}))
    args.enable_mamba_extra_buffer = lambda: False
    _, slots = solve(args, cache_params(), 0.25)
    for rows, capped in ((64, False), (20, True)):
        caplog.clear()
        with caplog.at_level("INFO"):
            pool = build_pool(slots=slots, rows=rows)
        (line,) = [r.message for r in caplog.records if "GiB reserved" in r.message]
        assert ("capped later" in line) == capped and f"{rows} request rows" in line
        allocated = sum(t.untyped_storage().nbytes() for t in tensors_of(pool).values())
        assert memory.reserved_bytes + 1024 >= allocated
