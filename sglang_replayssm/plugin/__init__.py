"""The SGLang side: flags, seams and hooks. Only this package imports SGLang."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point (group `sglang.srt.plugins`): add the flags and the two hooks that switch everything else on.

    No kernel is imported and no other function is hooked: without the flag the server runs SGLang's own code.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_replayssm.plugin import activation, flags, seams

    if seams.tree_is_patched():
        logger.info("This SGLang carries the sglang-replayssm patches, so the plugin hooks nothing.")
        return
    flags.add_to_server_args()
    HookRegistry.register(activation.CHECK_ARGS, activation.check_server_args, HookType.AROUND)
    HookRegistry.register(activation.START_SCHEDULER, activation.configure_scheduler_process, HookType.AROUND)
