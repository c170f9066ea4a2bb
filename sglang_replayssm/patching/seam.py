"""What a patched SGLang calls: the decorator on each hooked function, and the switch that brings the hooks to life."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any

from sglang_replayssm.plugin import seams

# The hooks that are live in this process, by dotted path. All others leave their function as it is.
_live: dict[str, Callable[..., Any]] = {}
_ALWAYS = frozenset(seam.hook for seam in seams.ALWAYS)


def replayssm_seam(hook: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: call the AROUND hook at `module:function` with the function, as SGLang's HookRegistry would.

    The hooks of `seams.ALWAYS` look at the flag themselves; all others stay out of the way until `switch_on`. The hook
    is imported when it is first needed, so that a server without the flag imports no kernel.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seam(*args, **kwargs):
            around = _live.get(hook)
            if around is None:
                if hook not in _ALWAYS:
                    return function(*args, **kwargs)
                around = _live[hook] = pkgutil.resolve_name(hook)
            return around(function, *args, **kwargs)

        seam.__replayssm_hook__ = hook
        return seam

    return decorate


def switch_on(wanted: Iterable[seams.Seam]) -> None:
    """Bring the hooks of these seams to life in this process."""
    for seam in wanted:
        _live[seam.hook] = pkgutil.resolve_name(seam.hook)


def is_decorated(seam: seams.Seam) -> bool:
    """Whether the running SGLang calls this seam's hook through the decorator."""
    try:
        function = pkgutil.resolve_name(seam.target)
    except (AttributeError, ImportError):
        return False
    return getattr(function, "__replayssm_hook__", None) == seam.hook
