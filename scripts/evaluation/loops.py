"""Output that loops: one block of text, over and over."""

from __future__ import annotations

import numpy as np

# A block repeated this often is a loop, respectively a hopeless one.
LOOP, LONG_LOOP = 50, 200

# Rules, tables' borders and indentation repeat in good answers too.
_LAYOUT = frozenset(" \t\n-=_.*|~:+#")


def repetitions(text: str, at_least: int = LOOP) -> int:
    """How often the most repeated block of `text` follows itself, or 0 if none does `at_least` times.

    A block of p characters repeated n times is a stretch where text[i] == text[i + p] for (n - 1) p characters: one
    comparison of the text with itself for each p.
    """
    characters = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    most = 0
    for period in range(1, len(characters) // at_least + 1):
        equal = characters[period:] == characters[:-period]
        needed = (at_least - 1) * period
        if np.count_nonzero(equal) < needed:
            continue
        edges = np.flatnonzero(np.diff(equal, prepend=False, append=False))
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            if end - begin >= needed and not _LAYOUT.issuperset(text[begin : begin + period]):
                most = max(most, int(end - begin) // period + 1)
    return most
