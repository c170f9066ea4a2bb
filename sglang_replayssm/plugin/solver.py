"""SGLang's memory solver and pools without a GPU: what a server with these arguments would allocate.

Nothing is derived again here. SGLang's own code resolves the arguments, divides the memory and builds the pools, with
this package's hooks of `memory.py` where the ring is asked for; the pools are built of tensors without storage, and
only what a GPU would have to be asked is put in by the caller.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch.overrides import TorchFunctionMode

from sglang_replayssm.plugin import flags, memory, seams, support
from sglang_replayssm.plugin.pool import ring_of

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
    from sglang.srt.server_args import ServerArgs

GIB = memory.GIB
# Every hook that reserves or allocates is in memory.py; the others do not change what a server takes.
MEMORY_HOOKS = tuple(seam for seam in seams.RING if seam.hook.startswith(f"{memory.__name__}:"))


@dataclass(frozen=True)
class Gpu:
    """What SGLang would measure on one GPU, in GiB.

    Attributes:
        before_load: free memory before weights are loaded.
        weights: weights of target and draft model together, as resident when the pools are sized (see `draft_copies`).
    """

    before_load: float
    weights: float


@dataclass(frozen=True)
class Pools:
    """What one rank allocates, in bytes unless said otherwise.

    Attributes:
        requests: rows, the requests that the scheduler runs at a time.
        slots: checkpoints, without the padding slot.
        state: recurrent and conv state of all slots.
        snapshots: state copies of the recurrent verify. 0 with the ring.
        windows: conv windows of the drafts.
        ring: records of the ring. 0 without it.
        cursors: cursors, step plan, counters and window index of the ring, once a worker. 0 without it.
        kv_tokens: tokens of KV cache.
        kv_target, kv_draft: KV cache of the target model and of the draft model.
        kv_draft_budgeted: whether SGLang set the draft's KV cache aside; where not, it comes out of the reserve.
        request_table: positions of every row's tokens, which SGLang does not set aside either.
        reserve: what is left of the memory for activations, CUDA graphs and workspaces.
    """

    requests: int
    slots: int
    state: int
    snapshots: int
    windows: int
    ring: int
    cursors: int
    kv_tokens: int
    kv_target: int
    kv_draft: int
    kv_draft_budgeted: bool
    request_table: int
    reserve: int

    @property
    def scratch(self) -> int:
        return self.snapshots + self.windows + self.ring + self.cursors

    @property
    def kv(self) -> int:
        return self.kv_target + self.kv_draft


def server_args(argv: list[str], gpu_memory: float) -> ServerArgs:
    """What SGLang makes of this command line on a machine with CUDA. NEXTN with 4 draft tokens is the default.

    Args:
        argv: options of the server, the model among them.
        gpu_memory: GiB of one GPU, by which SGLang chooses defaults.

    Raises:
        ValueError: SGLang refuses them; the message is SGLang's.
        SystemExit: they cannot be parsed; argparse has printed why.
    """
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.server_args_config_parser import ConfigArgumentMerger

    flags.add_to_server_args()
    parser = argparse.ArgumentParser(prog="sglang-replayssm plan", usage="see sglang-replayssm plan --help")
    ServerArgs.add_cli_args(parser)
    parser.set_defaults(device="cuda", skip_tokenizer_init=True, speculative_algorithm="NEXTN")
    if "--config" in argv:
        argv = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    parsed = parser.parse_args(argv)
    if parsed.speculative_eagle_topk is None:
        parsed.speculative_eagle_topk = 1
    if parsed.speculative_num_steps is None:
        parsed.speculative_num_steps = (parsed.speculative_num_draft_tokens or 4) - 1
    if parsed.speculative_num_draft_tokens is None:
        parsed.speculative_num_draft_tokens = parsed.speculative_num_steps + 1
    module = "sglang.srt.server_args"
    cuda = mock.patch(f"{module}.is_cuda", lambda: True)
    capacity = mock.patch(f"{module}.get_device_memory_capacity", lambda device: gpu_memory * 1024)  # MiB
    with cuda, capacity:
        try:
            return ServerArgs.from_cli_args(parsed)
        except Exception as error:  # assertions, KeyErrors and more, for what a user got wrong
            raise ValueError(f"SGLang refuses these arguments or this config.json: {error!r}") from error


def why_no_plan(args: ServerArgs) -> str | None:
    """Why SGLang's allocations cannot be told for this configuration, ring or not; None if they can."""
    if args.pp_size > 1:
        return f"--pp-size is {args.pp_size}: the stages differ, and the ring is not used there"
    if args.speculative_algorithm not in support.ALGORITHMS:
        return f"--speculative-algorithm is {args.speculative_algorithm}: only {', '.join(support.ALGORITHMS)} verify"
    runner = _runner(args)
    if runner.hybrid_gdn_config is None:
        return f"{runner.model_config.hf_config.architectures[0]} has no Gated-DeltaNet layers, so there is no state"
    return None


def why_no_ring(args: ServerArgs) -> list[str]:
    """The server's own reasons for not using the ring, empty if it can.

    Raises:
        ValueError: a contradiction among the flags, with which the server would not start.
    """
    flags.raise_on_contradiction(args)
    return support.why_not(args)


def draft_copies(args: ServerArgs) -> int:
    """Bytes, over all ranks, of the embedding and head that a checkpoint holds once and SGLang loads twice.

    An MTP draft has its own until the pools are sized, then it shares the target's. A separate draft model has both in
    its own checkpoint.
    """
    if args.speculative_draft_model_path not in (None, args.model_path):
        return 0
    config = args.get_model_config()
    tables = 1 if getattr(config.hf_text_config, "tie_word_embeddings", False) else 2
    return tables * config.vocab_size * config.hidden_size * config.dtype.itemsize


def pools(args: ServerArgs, gpu: Gpu, ring: bool) -> Pools:
    """What the server allocates with the ring or without, from SGLang's own solver and pool classes.

    Raises:
        ValueError: there is not enough memory; the message is SGLang's.
    """
    with _without_gpu(args, gpu, ring) as args:
        target, config = _solved(args, gpu)
        with _NoStorage(), _without_warmup():
            target._apply_memory_pool_config(config)
            draft = _draft_runner(args, target, config)
            draft._apply_memory_pool_config(config)
        return _measured(target, draft, gpu)


def concurrent(args: ServerArgs, pools: Pools, tokens: int) -> int:
    """How many requests of `tokens` tokens (prompt and answer) run at once without one being retracted."""
    return min(pools.requests, pools.kv_tokens // _tokens_held(args, tokens))


def best_max_running_requests(args: ServerArgs, gpu: Gpu, ring: bool, tokens: int) -> int:
    """The largest --max-running-requests (of one replica) whose requests of `tokens` tokens all run at once.

    0 if not even one does.
    """
    replicas = args.dp_size if args.enable_dp_attention else 1

    def all_run(requests: int) -> bool:
        limited = copy.copy(args)
        limited.max_running_requests = requests * replicas
        try:
            with _without_gpu(limited, gpu, ring) as limited:
                _, config = _solved(limited, gpu)
                held = _tokens_held(limited, tokens)
        except ValueError:
            return False
        return config.max_running_requests >= requests and config.max_total_num_tokens >= requests * held

    low, high = 0, 1
    while all_run(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if all_run(middle) else (low, middle)
    return low


class _NoStorage(TorchFunctionMode):
    """Every tensor that asks for a CUDA device gets shape and dtype, and no memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextlib.contextmanager
def _without_gpu(args: ServerArgs, gpu: Gpu, ring: bool) -> Iterator[ServerArgs]:
    """Answer what SGLang asks a GPU and its process groups; yields a copy of the arguments, which the solver changes.

    The hooks that reserve and allocate the ring are in place inside, if it is asked for.
    """
    from sglang.srt.distributed import parallel_state
    from sglang.srt.layers.dp_attention import compute_dp_attention_world_info
    from sglang.srt.model_executor import model_runner_kv_cache_mixin as solver
    from sglang.srt.runtime_context import get_context

    args = copy.deepcopy(args)
    setattr(args, flags.ENABLE.name, ring)
    parallel = (args.enable_dp_attention, 0, args.tp_size, args.dp_size, args.attn_cp_size)
    group = SimpleNamespace(world_size=compute_dp_attention_world_info(*parallel)[1])
    world = SimpleNamespace(world_size=args.tp_size, cpu_group=None)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(parallel_state, "_ATTN_TP", group))
        stack.enter_context(mock.patch.object(get_context(), "_server_args", args))
        stack.enter_context(mock.patch.object(solver, "get_world_group", lambda: world))
        stack.enter_context(
            mock.patch.object(solver, "get_available_gpu_memory", lambda *_, **__: gpu.before_load - gpu.weights)
        )
        stack.enter_context(mock.patch.object(memory, "reserved_bytes", None))
        for seam in MEMORY_HOOKS if ring else ():
            stack.enter_context(_hooked(seam))
        yield args


@contextlib.contextmanager
def _hooked(seam: seams.Seam) -> Iterator[None]:
    """Our hook around the function, as in a server, until the end of the block."""
    owner, _, name = seam.target.rpartition(".")
    owner = pkgutil.resolve_name(owner)
    original, hook = getattr(owner, name), pkgutil.resolve_name(seam.hook)

    @functools.wraps(original)
    def around(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    with mock.patch.object(owner, name, around):
        yield


def _without_warmup() -> contextlib.AbstractContextManager:
    """The KV pool's constructor launches its copy kernel once, which allocates nothing that stays."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return mock.patch.object(MHATokenToKVPool, "_init_kv_copy_and_warmup", lambda self: None)


def _solved(args: ServerArgs, gpu: Gpu) -> tuple[ModelRunner, MemoryPoolConfig]:
    runner = _runner(args)
    try:
        return runner, runner._resolve_memory_pool_config(gpu.before_load)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _runner(args: ServerArgs, **draft: Any) -> ModelRunner:
    """SGLang's ModelRunner as far as its constructor comes without a device, and what loading a model adds to it."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.model_executor.model_runner import ModelRunner

    class Configured(Exception):
        pass

    class PlannedRunner(ModelRunner):
        def model_specific_adjustment(self) -> None:
            raise Configured  # what follows in the constructor needs the device

    model_config = ModelConfig.from_server_args(
        args,
        model_path=(draft and args.speculative_draft_model_path) or args.model_path,
        is_draft_model=bool(draft),
    )
    runner = PlannedRunner.__new__(PlannedRunner)
    ranks = dict.fromkeys(("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "nccl_port"), 0)
    sizes = {"tp_size": args.tp_size, "moe_ep_size": args.ep_size, "pp_size": args.pp_size}
    with contextlib.suppress(Configured):
        runner.__init__(model_config, args.mem_fraction_static, server_args=args, **ranks, **sizes, **draft)
    runner.model = SimpleNamespace()
    runner.dtype = model_config.dtype
    runner.configure_kv_cache_dtype()
    runner.start_layer, runner.end_layer = 0, model_config.num_hidden_layers
    runner.num_effective_layers = model_config.num_hidden_layers
    return runner


def _draft_runner(args: ServerArgs, target: ModelRunner, config: MemoryPoolConfig) -> ModelRunner:
    runner = _runner(
        args,
        is_draft_worker=True,
        req_to_token_pool=target.req_to_token_pool,
        token_to_kv_pool_allocator=target.token_to_kv_pool_allocator,
        memory_pool_config=config,
    )
    if runner.model_config.num_nextn_predict_layers:  # as ModelRunner.initialize() counts the draft's layers
        runner.end_layer = runner.num_effective_layers = runner.model_config.num_nextn_predict_layers
    return runner


def _measured(target: ModelRunner, draft: ModelRunner, gpu: Gpu) -> Pools:
    mamba = target.req_to_token_pool.mamba_pool
    cache, ring = mamba.mamba_cache, ring_of(target.req_to_token_pool)
    snapshots = getattr(cache, "intermediate_ssm", None)
    kv_target, kv_draft = (_kv_bytes(runner.token_to_kv_pool) for runner in (target, draft))
    table = target.req_to_token_pool.req_to_token.nbytes
    state = _bytes(*cache.conv, cache.temporal)
    scratch = {
        "snapshots": 0 if snapshots is None else _bytes(snapshots),
        "windows": _bytes(*getattr(mamba, "_intermediate_conv_window_phys", ())),
        "ring": 0 if ring is None else _bytes(*ring.ring.tensors().values()),
        "cursors": 0 if ring is None else memory.cursor_bytes(ring),
    }
    shared = draft_copies(target.server_args) // target.tp_size
    used = round(gpu.weights * GIB) - shared + state + sum(scratch.values()) + kv_target + kv_draft + table
    return Pools(
        requests=target.max_running_requests,
        slots=mamba.size,
        state=state,
        **scratch,
        kv_tokens=target.max_total_num_tokens,
        kv_target=kv_target,
        kv_draft=kv_draft,
        kv_draft_budgeted=bool(target.eagle_draft_num_layers),
        request_table=table,
        reserve=round(gpu.before_load * GIB) - used,
    )


def _tokens_held(args: ServerArgs, tokens: int) -> int:
    """KV tokens that a request of this length has at its end: with room for the next drafts, in whole pages."""
    from sglang.srt.mem_cache.common import get_alloc_reserve_per_decode

    return -(-(tokens + get_alloc_reserve_per_decode(args)) // args.page_size) * args.page_size


def _kv_bytes(pool: KVCache) -> int:
    return sum(int(size) for size in pool.get_kv_size_bytes())


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)
