"""Replacing a module attribute everywhere it has been imported to."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def rebind(module: ModuleType, name: str, replacement: Any, package: str = "sglang") -> None:
    """Set `module.name`, and every module global inside `package` that is the same object.

    `from module import name` copies the reference, so setting it in one place is not enough. Modules of the plugin
    under test share the prefix and are covered too, whichever plugin was loaded first; modules imported later find the
    replacement by themselves. Keep originals in closures: a module global holding one would be rebound as well.
    """
    original = getattr(module, name)
    if original is replacement:
        return
    setattr(module, name, replacement)
    for other in list(sys.modules.values()):
        if not getattr(other, "__name__", "").startswith(package):
            continue
        for attribute, value in list(vars(other).items()):
            if value is original:
                setattr(other, attribute, replacement)
