"""Unified diffs, read and applied in memory, byte for byte.

Stricter than `patch`: a hunk goes only where all its lines, context included, are found exactly once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_PREFIX = b"python/sglang/"
_NO_FILE = b"/dev/null"


class State(str, Enum):
    PENDING = "pending"
    APPLIED = "applied"
    CONFLICT = "conflict"


@dataclass(frozen=True)
class Hunk:
    """Lines (with their ends) before and after; `title` names the hunk in messages."""

    title: str
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]

    def state(self, lines: list[bytes]) -> State:
        pending, applied = len(_places(lines, self.before)), len(_places(lines, self.after))
        if (pending, applied) == (1, 0):
            return State.PENDING
        return State.APPLIED if (pending, applied) == (0, 1) else State.CONFLICT

    def replaced(self, lines: list[bytes], old: tuple[bytes, ...], new: tuple[bytes, ...]) -> list[bytes]:
        (place,) = _places(lines, old)
        return [*lines[:place], *new, *lines[place + len(old) :]]


@dataclass(frozen=True)
class FileDiff:
    """All hunks of one patch on one file; `path` is relative to the `sglang` package. `creates`: a new file."""

    path: str
    hunks: tuple[Hunk, ...]
    creates: bool

    def states(self, content: bytes | None) -> list[tuple[Hunk, State]]:
        """Each hunk's state in the file's content, None if there is no file."""
        if self.creates:
            expected = b"".join(self.hunks[0].after)
            state = {None: State.PENDING, expected: State.APPLIED}.get(content, State.CONFLICT)
            return [(self.hunks[0], state)]
        if content is None:
            return [(hunk, State.CONFLICT) for hunk in self.hunks]
        lines = content.splitlines(keepends=True)
        return [(hunk, hunk.state(lines)) for hunk in self.hunks]

    def changed(self, content: bytes | None, reverse: bool) -> bytes | None:
        """The content with every hunk applied, or taken back; None is no file. All hunks must be in the right state."""
        if self.creates:
            return None if reverse else b"".join(self.hunks[0].after)
        lines = content.splitlines(keepends=True)
        for hunk in self.hunks:
            old, new = (hunk.after, hunk.before) if reverse else (hunk.before, hunk.after)
            lines = hunk.replaced(lines, old, new)
        return b"".join(lines)


def read_patch(patch: Path) -> list[FileDiff]:
    """The files of one unified diff with `a/python/sglang/...` paths.

    Raises:
        ValueError: not such a diff.
    """
    lines = patch.read_bytes().splitlines(keepends=True)
    files, i = [], 0
    while i < len(lines):
        if not lines[i].startswith(b"--- "):
            i += 1
            continue
        source, target = lines[i][4:].strip(), lines[i + 1][4:].strip()
        path = target.removeprefix(b"b/")
        if not path.startswith(_PREFIX):
            raise ValueError(f"{patch.name}: {path.decode()} is not below {_PREFIX.decode()}")
        path, hunks, i = path.removeprefix(_PREFIX).decode(), [], i + 2
        while i < len(lines) and (header := _HUNK.match(lines[i])):
            title = f"{patch.name}: {path}:{header[1].decode()}"
            hunk, i = _read_hunk(title, lines, i + 1, int(header[2] or 1), int(header[3] or 1))
            hunks.append(hunk)
        files.append(FileDiff(path, tuple(hunks), creates=source == _NO_FILE))
    if not files:
        raise ValueError(f"{patch.name}: no unified diff")
    return files


def _read_hunk(title: str, lines: list[bytes], i: int, before_count: int, after_count: int) -> tuple[Hunk, int]:
    before, after = [], []
    while len(before) < before_count or len(after) < after_count:
        if i == len(lines) or lines[i][:1] not in (b" ", b"-", b"+"):
            raise ValueError(f"{title}: the hunk is shorter than its header says")
        mark, text = lines[i][:1], lines[i][1:]
        if mark != b"+":
            before.append(text)
        if mark != b"-":
            after.append(text)
        i += 1
    return Hunk(title, tuple(before), tuple(after)), i


def _places(lines: list[bytes], block: tuple[bytes, ...]) -> list[int]:
    first, size = block[0], len(block)
    return [i for i, line in enumerate(lines) if line == first and tuple(lines[i : i + size]) == block]
