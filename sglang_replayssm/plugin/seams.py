"""The one table of what this package touches in SGLang, and whether the installed SGLang still has it.

A seam is a function of SGLang that is hooked, or that a hook calls or relies on. Its fingerprint is that of its source
text in the pinned release. On any mismatch the ring refuses as a whole: SGLang keeps working as stock, and using the
flag is an error that names the seams.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

PINNED_SGLANG = "0.5.15.post1"
# The module that the patch series adds to a tree, which is how a patched SGLang is told from a stock one.
PATCH_MODULE = "sglang.srt.replayssm"


class Status(str, Enum):
    OK = "ok"
    PATCHED = "patched"
    DIFFERS = "differs"
    MISSING = "missing"


@dataclass(frozen=True)
class Seam:
    """A function or class of SGLang.

    Attributes:
        module, name: where it is; `module.name` is the dotted path that SGLang's HookRegistry takes.
        purpose: what this package does there.
        fingerprint: of its source text in the pinned release, see `fingerprint_of`.
        hook: dotted path `module:function` of our AROUND hook, or None if the seam is only called or relied on.
    """

    module: str
    name: str
    purpose: str
    fingerprint: str
    hook: str | None = None

    @property
    def target(self) -> str:
        return f"{self.module}.{self.name}"


_ARGS = "sglang.srt.server_args"
_POOL = "sglang.srt.mem_cache.memory_pool"
_RUNNER = "sglang.srt.model_executor.model_runner"
_GDN = "sglang.srt.layers.attention.linear.gdn_backend"
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_SPEC = "sglang.srt.speculative.spec_utils"
_SCHEDULER = "sglang.srt.managers.scheduler"
_BATCH = "sglang.srt.managers.schedule_batch"
_CACHE = "sglang.srt.mem_cache"
_OURS = "sglang_replayssm.plugin"

# Hooked when the plugin is loaded, flag or no flag (see plugin/__init__.py).
ALWAYS = (
    Seam(
        _ARGS,
        "ServerArgs.check_server_args",
        "refuse contradictions and mismatches before a GPU is touched",
        "89ed6f8dc5be16e2",
        f"{_OURS}.activation:check_server_args",
    ),
    Seam(
        _SCHEDULER,
        "configure_scheduler_process",
        "switch the ring on in a scheduler process",
        "7045a1489b29ba74",
        f"{_OURS}.activation:configure_scheduler_process",
    ),
)

# Hooked in scheduler processes of a server that uses the ring.
RING = (
    Seam(
        f"{_RUNNER}_kv_cache_mixin",
        "ModelRunnerKVCacheMixin.handle_max_mamba_cache",
        "reserve the ring's bytes instead of the snapshots'",
        "b0d755eecc5e20da",
        f"{_OURS}.memory:handle_max_mamba_cache",
    ),
    Seam(
        _POOL,
        "MambaPool.__init__",
        "allocate the ring, never the snapshots",
        "1b8fee3f1dada7c4",
        f"{_OURS}.memory:init_mamba_pool",
    ),
    Seam(
        _POOL, "HybridReqToTokenPool.alloc", "note rows given to a request", "9a0a312c3f17eac9", f"{_OURS}.rows:alloc"
    ),
    Seam(
        _RUNNER,
        "ModelRunner._maybe_execute_deferred_mamba_cow_and_clear",
        "reset new rows, fold continued ones, before an extend",
        "529cc5573ea9579e",
        f"{_OURS}.rows:before_extend",
    ),
    Seam(
        _GDN,
        "GDNAttnBackend.forward_extend",
        "verify from the ring",
        "adaccc4fd4efa2fe",
        f"{_OURS}.verify:forward_extend",
    ),
    Seam(
        _GDN,
        "GDNAttnBackend.forward_decode",
        "refuse a plain decode, which would miss the ring's records",
        "06542bf28c5574bd",
        f"{_OURS}.verify:forward_decode",
    ),
    Seam(
        _HYBRID,
        "HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
        "commit the conv states only, track states for the prefix cache",
        "46e545774c6e3b08",
        f"{_OURS}.verify:update_mamba_state_after_mtp_verify",
    ),
    Seam(
        _SPEC,
        "commit_mamba_states_after_verify",
        "move the cursors over the accepted tokens",
        "0cf8cfe0fabca91a",
        f"{_OURS}.verify:commit_mamba_states_after_verify",
    ),
    Seam(
        f"{_CACHE}.common",
        "release_kv_cache",
        "fold a row whose slot the prefix cache takes over",
        "ede188643b8f2d3b",
        f"{_OURS}.donation:release_kv_cache",
    ),
)

# Hooked in scheduler processes of a server that was started with the flag, ring or not: its report, and a repair.
WITH_FLAG = (
    Seam(
        _SCHEDULER,
        "Scheduler.get_internal_state",
        "show the ring's state",
        "06d1ad336abf5f4c",
        f"{_OURS}.report:internal_state",
    ),
    Seam(
        _SCHEDULER,
        "Scheduler.process_input_requests",
        "read the counters between steps, for metrics and log",
        "175d4b6f7fe75470",
        f"{_OURS}.metrics:process_input_requests",
    ),
    Seam(
        _BATCH,
        "set_mamba_track_indices_from_reqs",
        "survive a request that finishes inside the next verify batch",
        "a63c2cd5912fee36",
        f"{_OURS}.tracking:set_mamba_track_indices_from_reqs",
    ),
)

# Not hooked: what the hooks call, or whose behaviour they build on.
RELIED_ON = (
    Seam("sglang.srt.plugins.hook_registry", "HookRegistry", "applies the hooks", "f6f48a4906fc8fa3"),
    Seam("sglang.srt.plugins", "load_plugins", "runs before arguments are parsed", "87dd7c6fbcc3b8d5"),
    Seam(
        "sglang.srt.arg_groups.arg_utils",
        "add_cli_args_from_dataclass",
        "makes options of the fields",
        "723e18fbad2fd920",
    ),
    Seam(_ARGS, "ServerArgs.from_cli_args", "carries the fields", "fd08e044b23204e7"),
    Seam(_ARGS, "ServerArgs.max_speculative_num_draft_tokens", "the largest draft length", "5f18ead4c1e663ee"),
    Seam(_POOL, "MambaPool.SpeculativeState", "holds state and conv windows", "fcfb3ab7dcd8e0fe"),
    Seam(_POOL, "MambaPool.State", "holds state and conv windows", "dd5fc3d89249a447"),
    Seam(_POOL, "conv_window_dedup_enabled", "what stock's conv windows take", "42d0aaced49297f1"),
    Seam(_POOL, "ReqToTokenPool.alloc", "gives rows to requests", "0e1762875732c346"),
    Seam(
        f"{_CACHE}.mamba_radix_cache",
        "MambaRadixCache.cache_finished_req",
        "takes a finished request's state",
        "63c47edccd32090c",
    ),
    Seam(
        f"{_CACHE}.mamba_radix_cache",
        "MambaRadixCache.cache_unfinished_req",
        "copies a live slot only after a prefill",
        "7cd1fdc688066b92",
    ),
    Seam(f"{_CACHE}.allocator.mamba", "MambaSlotAllocator.clear", "never gives slot 0 away", "86f0fbfa81b04864"),
    Seam(f"{_RUNNER}_kv_cache_mixin", "ModelRunnerKVCacheMixin._init_pools", "sizes the pools", "32ce92eab34d0ffa"),
    Seam(
        f"{_RUNNER}_kv_cache_mixin",
        "ModelRunnerKVCacheMixin._calculate_mamba_ratio",
        "slots per request",
        "f3e7790263dd6d3a",
    ),
    Seam(_HYBRID, "MambaAttnBackendBase._forward_metadata", "slots of a batch, -1 for padding", "af1bc8a00b662d27"),
    Seam(_HYBRID, "MambaAttnBackendBase._replay_metadata", "slots of a batch, -1 for padding", "29724ef97250ad80"),
    Seam(
        "sglang.srt.layers.attention.mamba.causal_conv1d_triton",
        "causal_conv1d_update",
        "whose arithmetic ours repeats",
        "88e4ef4cbdb18ebd",
    ),
    Seam(
        "sglang.srt.speculative.eagle_worker_v2",
        "EAGLEWorkerV2.verify",
        "calls the commit after sampling",
        "8663d29ce7adefad",
    ),
)

SEAMS = ALWAYS + WITH_FLAG + RING + RELIED_ON


def fingerprint_of(source: str, name: str) -> str | None:
    """First 16 hex digits of the SHA-256 of the source text of `name` (dotted inside the module), decorators included.

    The text, not the syntax tree: the tree's printed form differs between Python versions. None if `name` is absent.
    """
    lines = _lines_of(source, name)
    return None if lines is None else _digest(lines)


def _lines_of(source: str, name: str) -> list[str] | None:
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        children = [n for n in ast.iter_child_nodes(node) if getattr(n, "name", None) == part]
        if not children:
            return None
        node = children[-1]
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return source.splitlines()[first - 1 : node.end_lineno]


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(line.rstrip() for line in lines).encode()).hexdigest()[:16]


@functools.cache
def sglang_root() -> Path | None:
    """Folder of the installed `sglang` package, found without importing it; None if it is not installed."""
    spec = importlib.util.find_spec("sglang")
    return Path(next(iter(spec.submodule_search_locations))) if spec else None


@functools.cache
def _source(module: str) -> str | None:
    root = sglang_root()
    return None if root is None else read_module(root, module)


def read_module(root: Path, module: str) -> str | None:
    """Source of an SGLang module in the package folder `root`, None if it is absent."""
    stem = root.joinpath(*module.split(".")[1:])
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def installed_fingerprint(seam: Seam) -> str | None:
    """Fingerprint of the seam in the installed SGLang, None if it is absent."""
    source = _source(seam.module)
    return None if source is None else fingerprint_of(source, seam.name)


def status(seam: Seam) -> Status:
    """Whether the installed SGLang has this seam as the pin, or as the pin with our patch series, has it."""
    return status_in(_source(seam.module), seam)


def status_in(source: str | None, seam: Seam) -> Status:
    """Status of the seam in the source of its module. Patched is the pin's text below our decorator."""
    lines = None if source is None else _lines_of(source, seam.name)
    if lines is None:
        return Status.MISSING
    if _digest(lines) == seam.fingerprint:
        return Status.OK
    patched = lines[0].strip() == f'@replayssm_seam("{seam.hook}")' and _digest(lines[1:]) == seam.fingerprint
    return Status.PATCHED if patched else Status.DIFFERS


def tree_is_patched() -> bool:
    """Whether the installed SGLang carries the patch series, so that the plugin has to stay away."""
    return _source(PATCH_MODULE) is not None


def expected_status(seam: Seam) -> Status:
    """PATCHED for a hooked seam of a patched SGLang, OK for all others."""
    return Status.PATCHED if seam.hook and tree_is_patched() else Status.OK


def raise_on_mismatch() -> None:
    """Refuse an SGLang that is not the pinned one at any seam.

    Raises:
        RuntimeError: names every seam that differs or is missing, and what to install.
    """
    bad = [f"{seam.target} ({status(seam).value})" for seam in SEAMS if status(seam) is not expected_status(seam)]
    if bad:
        raise RuntimeError(
            "--enable-gdn-replayssm-spec cannot be used with this SGLang: "
            + ", ".join(bad)
            + f". Install the release it is made for (pip install sglang=={PINNED_SGLANG}), or drop the flag; "
            "`sglang-replayssm check` prints the whole report."
        )
