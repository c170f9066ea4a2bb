"""The plan's figures: SGLang's own solver and pools run without storage, against pools that are allocated for real."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for either of pytest's import modes
from test_memory import build_pool, cache_params, runner, tensors_of  # noqa: F401

from sglang_replayssm.plugin import flags, memory, solver, support
from sglang_replayssm.policies import POLICIES

GIB = 1 << 30
QWEN35_35B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 8,
    "num_experts": 256,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
}
H200 = solver.Gpu(before_load=139.0, weights=66.0)
SMALL = solver.Gpu(before_load=1.0, weights=0.2)


@pytest.fixture
def make_args(model_dir, tmp_path_factory):
    """The plan's ServerArgs of the tiny model; `config` overrides fields of it."""
    tiny = json.loads((Path(model_dir()) / "config.json").read_text())

    def make(*options: str, config: dict | None = None, gpu_memory: float = 141):
        model = tmp_path_factory.mktemp("model")  # a new one each time, since SGLang caches what it reads
        (model / "config.json").write_text(json.dumps(tiny | (config or {})))
        return solver.server_args(["--model-path", str(model), *options], gpu_memory)

    return make


@pytest.fixture
def qwen(make_args):
    return make_args(
        "--disable-radix-cache", "--max-running-requests=128", "--mem-fraction-static=0.88", config=QWEN35_35B
    )


def tiny_args(make_args, *options: str):
    return make_args("--disable-radix-cache", "--max-running-requests=24", "--mem-fraction-static=0.8", *options)


def test_qwen35_35b_takes_what_the_field_has_seen(qwen):
    """240 MiB of state copies a request at 4 draft tokens, 30 GiB at 128 requests; 20 KiB of KV cache a token."""
    stock, ring = (solver.pools(qwen, H200, ring) for ring in (False, True))
    rows = stock.requests + 1
    assert (stock.requests, stock.slots) == (ring.requests, ring.slots) == (128, 128)
    assert stock.snapshots == rows * 240 * 2**20 and ring.snapshots == stock.ring == 0
    assert stock.state == ring.state == rows * 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)
    assert (stock.windows, ring.windows) == (rows * 30 * 8192 * (4 + 2) * 2, rows * 30 * 8192 * 4 * 2)
    assert ring.ring == rows * 30 * (16 + 4) * (32 * (4 * 128 + 8) + 16 * 128 * 2)
    assert 0 < ring.cursors < 100 * rows and stock.cursors == 0
    assert stock.kv_target // stock.kv_tokens == 10 * 2 * 2 * 256 * 2 and stock.kv_draft * 10 == stock.kv_target


def test_the_freed_memory_is_kv_cache(qwen):
    """State and KV cache of the target fill what SGLang divides; conv windows are reserved densely by stock."""
    stock, ring = (solver.pools(qwen, H200, ring) for ring in (False, True))
    budget = (139.0 * 0.88 - 66.0) * GIB
    assert ring.state + ring.scratch + ring.kv_target == pytest.approx(budget, rel=1e-4)
    assert stock.state + stock.scratch + stock.kv_target == pytest.approx(budget, rel=0.03)
    outside = 139.0 * 0.12 * GIB + 2 * 151936 * 2048 * 2  # the draft's own embedding and head are dropped afterwards
    assert stock.reserve + stock.kv_draft + stock.request_table == pytest.approx(outside, rel=0.06)
    assert ring.reserve + ring.kv_draft + ring.request_table == pytest.approx(outside, rel=1e-3)


@pytest.mark.parametrize("fold", POLICIES)
@pytest.mark.parametrize(("drafts", "window"), [(4, 16), (8, 24)])
def test_state_and_scratch_are_those_of_a_real_pool(make_args, build_pool, drafts, window, fold):  # noqa: F811
    options = (f"--speculative-num-draft-tokens={drafts}", f"--gdn-replayssm-cache-len={window}")
    args = tiny_args(make_args, *options, f"--gdn-replayssm-fold={fold}")
    plan = solver.pools(args, SMALL, ring=True)
    real = build_pool(slots=plan.slots, rows=plan.requests, drafts=drafts, window=window, fold=fold)
    allocated = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(real).values())
    assert plan.state + plan.scratch == allocated
    assert plan.state == sum(tensor.nbytes for tensor in (*real.mamba_cache.conv, real.mamba_cache.temporal))


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer"])
def test_with_prefix_caching(make_args, build_pool, strategy):  # noqa: F811
    """The slots of cached and tracked states are SGLang's to count; ring and windows are of the requests alone."""
    options = [f"--mamba-radix-cache-strategy={strategy}", "--max-running-requests=24", "--mem-fraction-static=0.8"]
    args = make_args(*options, *(["--disable-overlap-schedule"] if strategy == "no_buffer" else []))
    assert solver.why_no_ring(args) == []
    stock, plan = (solver.pools(args, SMALL, ring) for ring in (False, True))
    assert plan.slots > stock.slots and plan.slots // plan.requests >= {"no_buffer": 3, "extra_buffer": 5}[strategy]
    real = build_pool(slots=plan.slots, rows=plan.requests)
    assert plan.state + plan.scratch == sum(t.untyped_storage().nbytes() for t in tensors_of(real).values())


@pytest.mark.parametrize("ring", [False, True])
def test_slots_and_kv_tokens_are_those_of_the_solver(make_args, ring):
    """The same division as test_memory's harness makes of the same memory."""
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin as Mixin

    args = tiny_args(make_args)
    plan = solver.pools(args, SMALL, ring)
    rest, solved = 1.0 * 0.8 - 0.2, copy.deepcopy(args)
    harness = runner(solved, cache_params())
    stock = Mixin.handle_max_mamba_cache
    left = memory.handle_max_mamba_cache(stock, harness, rest) if ring else stock(harness, rest)
    cell = 2 * 2 * 32 * 2  # one layer with full attention: K and V of 2 heads of 32, bf16
    assert plan.slots == solved.max_mamba_cache_size == 24
    assert plan.kv_tokens == pytest.approx(left * GIB / cell, abs=1)


def test_the_draft_layer_is_budgeted_only_with_a_path(make_args, model_dir):
    """As in SGLang: its cache is always allocated, but set aside only if the draft model is named."""
    default = solver.pools(tiny_args(make_args), SMALL, ring=True)
    named = solver.pools(tiny_args(make_args, f"--speculative-draft-model-path={model_dir()}"), SMALL, ring=True)
    assert not default.kv_draft_budgeted and named.kv_draft_budgeted
    assert default.kv_draft * named.kv_tokens == pytest.approx(named.kv_draft * default.kv_tokens, rel=1e-3)
    assert default.kv_target == pytest.approx(named.kv_target + named.kv_draft, rel=1e-3)


def test_tied_embeddings_are_loaded_twice_only_once(make_args):
    loose, tied = (make_args("--disable-radix-cache", config={"tie_word_embeddings": tie}) for tie in (False, True))
    assert solver.draft_copies(loose) == 2 * solver.draft_copies(tied) == 2 * 512 * 64 * 2


@pytest.mark.parametrize("ring", [False, True])
def test_as_many_requests_run_at_once_as_the_plan_says(make_args, ring):
    """With the best --max-running-requests all of them do, with one more they do not."""
    args = tiny_args(make_args)
    best = solver.best_max_running_requests(args, SMALL, ring, tokens=700)
    for requests in (best, best + 1):
        args.max_running_requests = requests
        pools = solver.pools(args, SMALL, ring)
        fits = pools.requests * (700 + 8) <= pools.kv_tokens  # SGLang holds two windows of 4 ahead
        assert fits == (requests == best)
        assert (solver.concurrent(args, pools, 700) == requests) == fits
    assert args.max_running_requests == best + 1, "the search leaves the arguments alone"


def test_tensor_parallelism_and_data_parallel_attention(make_args):
    whole, half = (tiny_args(make_args, f"--tp={tp}") for tp in (1, 2))
    replicas = tiny_args(make_args, "--tp=2", "--dp-size=2", "--enable-dp-attention")
    whole, half, replica = (solver.pools(args, SMALL, ring=True) for args in (whole, half, replicas))
    assert whole.state == 2 * half.state and whole.windows == 2 * half.windows
    assert replica.requests == whole.requests // 2 and replica.kv_target // replica.kv_tokens == 256
    best = (solver.best_max_running_requests(args, SMALL, True, 700) for args in (tiny_args(make_args), replicas))
    assert next(best) == pytest.approx(next(best), rel=0.01)


def test_nothing_of_the_planning_stays(make_args):
    from sglang.srt.distributed import parallel_state
    from sglang.srt.mem_cache.memory_pool import MambaPool
    from sglang.srt.runtime_context import get_context

    args, constructor = tiny_args(make_args), MambaPool.__init__
    before = copy.deepcopy(args), get_context()._server_args, parallel_state._ATTN_TP, memory.reserved_bytes
    solver.pools(args, SMALL, ring=True)
    assert MambaPool.__init__ is constructor
    assert (args, get_context()._server_args, parallel_state._ATTN_TP, memory.reserved_bytes) == before


def test_the_hooks_of_the_plan_are_those_of_the_server():
    names = {seam.name for seam in solver.MEMORY_HOOKS}
    assert names >= {"ModelRunnerKVCacheMixin.handle_max_mamba_cache", "MambaPool.__init__"}


def test_the_reasons_are_the_servers(make_args):
    args = make_args("--disable-radix-cache", "--enable-two-batch-overlap", "--speculative-num-draft-tokens=20")
    assert solver.why_no_ring(args) == support.why_not(args) != []
    assert solver.why_no_ring(tiny_args(make_args)) == []
    with pytest.raises(ValueError, match=flags.CACHE_LEN.option):
        solver.why_no_ring(tiny_args(make_args, "--gdn-replayssm-cache-len=2"))


def test_what_has_no_plan_at_all(make_args):
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert "no Gated-DeltaNet layers" in solver.why_no_plan(make_args(config=llama))
    assert "--pp-size is 2" in solver.why_no_plan(tiny_args(make_args, "--pp-size=2", "--disable-overlap-schedule"))
    assert solver.why_no_plan(tiny_args(make_args)) is None


def test_too_little_memory_is_sglangs_message(make_args):
    with pytest.raises(ValueError, match="--mem-fraction-static"):
        solver.pools(tiny_args(make_args), solver.Gpu(before_load=1.0, weights=0.9), ring=True)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), (3, 1, 4)),
        (("--speculative-num-draft-tokens=8",), (7, 1, 8)),
        (("--speculative-num-steps=2",), (2, 1, 3)),
    ],
)
def test_speculation_is_the_default(make_args, options, expected):
    args = make_args("--disable-radix-cache", *options)
    assert args.speculative_algorithm == "EAGLE"  # what SGLang makes of NEXTN
    found = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    assert found == expected


def test_a_config_file_is_read_as_by_the_server(make_args, tmp_path):
    (tmp_path / "serve.yaml").write_text("max-running-requests: 9\ndisable-radix-cache: true\n")
    args = make_args("--config", str(tmp_path / "serve.yaml"))
    assert args.max_running_requests == 9 and args.disable_radix_cache


def test_arguments_that_sglang_refuses(make_args):
    with pytest.raises(ValueError, match=r"SGLang refuses .*NONSENSE"):
        make_args("--disable-radix-cache", "--speculative-algorithm=NONSENSE")
    with pytest.raises(ValueError, match=r"SGLang refuses .*nonsense"):
        make_args(config={"model_type": "nonsense"})
