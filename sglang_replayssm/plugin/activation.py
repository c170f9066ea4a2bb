"""Switching the ring on: checks in the main process, hooks in each scheduler process, nothing without the flag."""

from __future__ import annotations

import logging
import pkgutil
from typing import TYPE_CHECKING

from sglang_replayssm.patching import seam as patched_seams
from sglang_replayssm.plugin import flags, seams, support

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

CHECK_ARGS, START_SCHEDULER = (seam.target for seam in seams.ALWAYS)

# Why this process serves without the ring; None before a scheduler process has decided.
reasons: list[str] | None = None


def active() -> bool:
    """Whether this process serves from the ring."""
    return reasons == []


def check_server_args(original, self: ServerArgs):
    """AROUND ServerArgs.check_server_args: with the flag, stop the start on a mismatch or a contradiction."""
    if flags.enabled(self):
        seams.raise_on_mismatch()
        _raise_on_missing_hooks(seams.ALWAYS)
        flags.raise_on_contradiction(self)
        if self.use_ray and not seams.tree_is_patched():
            logger.warning(
                "%s: the ring is not used because --use-ray starts schedulers that load no plugins. "
                "Serving through SGLang's recurrent verify.",
                flags.ENABLE.option,
            )
    return original(self)


def configure_scheduler_process(original, server_args: ServerArgs, gpu_id: int, tp_rank: int, *args, **kwargs):
    """AROUND configure_scheduler_process: decide, once, whether this scheduler process serves from the ring."""
    result = original(server_args, gpu_id, tp_rank, *args, **kwargs)
    if flags.enabled(server_args):
        activate(server_args, announce=tp_rank == 0)
    return result


def activate(server_args: ServerArgs, announce: bool = True) -> None:
    """Hook SGLang so that this process serves from the ring, or say why it does not.

    Args:
        announce: log the decision (one rank of a group is enough).

    Raises:
        RuntimeError: a seam differs from the pin, or a hook did not apply: never serve half-enabled.
    """
    global reasons
    seams.raise_on_mismatch()
    reasons = support.why_not(server_args)
    _apply(seams.WITH_FLAG if reasons else seams.WITH_FLAG + seams.RING)
    if announce:
        _announce(server_args)


def _announce(server_args: ServerArgs) -> None:
    if reasons:
        logger.warning(
            "%s: the ring is not used because %s. Serving through SGLang's recurrent verify.",
            flags.ENABLE.option,
            "; ".join(reasons),
        )
    else:
        logger.info(
            "GDN ReplaySSM verify is on: window W=%d, T_max=%d, fold=%s",
            server_args.gdn_replayssm_cache_len,
            server_args.max_speculative_num_draft_tokens,
            server_args.gdn_replayssm_fold,
        )


def _apply(wanted: tuple[seams.Seam, ...]) -> None:
    if seams.tree_is_patched():
        patched_seams.switch_on(wanted)
    else:
        _register(wanted)
    _raise_on_missing_hooks(wanted)


def _register(wanted: tuple[seams.Seam, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    taken = [seam.target for seam in wanted if seam.target in HookRegistry._patched]
    if taken:  # apply_hooks() would pass over ours without a word
        raise RuntimeError(
            f"{flags.ENABLE.option}: another plugin already hooks {', '.join(taken)}, and SGLang applies the hooks "
            "of a function only once. Start without that plugin (SGLANG_PLUGINS names those to load), "
            "or without the flag."
        )
    for seam in wanted:
        HookRegistry.register(seam.target, pkgutil.resolve_name(seam.hook), HookType.AROUND)
    HookRegistry.apply_hooks()


def _raise_on_missing_hooks(wanted: tuple[seams.Seam, ...]) -> None:
    """SGLang logs and swallows a hook that fails to apply; a server with the flag must not start then."""
    in_place = patched_seams.is_decorated if seams.tree_is_patched() else _is_hooked
    missing = [seam.target for seam in wanted if not in_place(seam)]
    if missing:
        raise RuntimeError(
            f"{flags.ENABLE.option}: SGLang did not apply the hooks on {', '.join(missing)} (its log says why). "
            "Another plugin may hold them; `sglang-replayssm check` prints the report."
        )


def _is_hooked(seam: seams.Seam) -> bool:
    """Whether our hook is in the chain of wrappers that SGLang built around this function."""
    hook = pkgutil.resolve_name(seam.hook)
    try:
        function = pkgutil.resolve_name(seam.target)
    except (AttributeError, ImportError):
        return False
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
