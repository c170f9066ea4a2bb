"""Draft trees and cache locations: select SGLang's own Triton versions instead of those compiled into sgl-kernel.

Both modules choose by device flags taken at import; the flag of the one platform that uses the Triton versions also
forces greedy verification.
"""

from __future__ import annotations


def install() -> None:
    from sglang.srt.speculative import eagle_utils
    from sglang.srt.speculative.triton_ops import cache_locs

    eagle_utils._is_xpu = True
    cache_locs._is_xpu = True
