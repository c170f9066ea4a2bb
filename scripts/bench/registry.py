"""All variants by name."""

from __future__ import annotations

from . import flashinfer, ours, sglang_rings, stock
from .variant import Variant

VARIANTS: dict[str, type[Variant]] = {
    variant.name: variant for module in (ours, stock, sglang_rings, flashinfer) for variant in module.VARIANTS
}
# Name -> candidates, of which the fastest at each shape is reported.
TUNED: dict[str, tuple[type[Variant], ...]] = sglang_rings.TUNED

NAMES = (*VARIANTS, *TUNED)


def candidates(name: str) -> tuple[type[Variant], ...]:
    """The concrete variants behind a name."""
    return TUNED[name] if name in TUNED else (VARIANTS[name],)
