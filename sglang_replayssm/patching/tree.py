"""The patch series on one source tree of SGLang: its state, and changing it safely."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sysconfig
import tempfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sglang_replayssm.patching.diff import FileDiff, Hunk, State, read_patch
from sglang_replayssm.plugin import seams

_SERIES = Path("patches") / f"sglang-{seams.PINNED_SGLANG}"


class PatchError(RuntimeError):
    """The tree cannot be patched, or not be reversed; the message names every place and nothing was written."""


class TreeState(str, Enum):
    UNPATCHED = "unpatched"
    PATCHED = "patched"
    DIFFERS = "differs"


def find_series() -> Path:
    """Folder of the series: of this checkout, or where the wheel's data files are.

    Raises:
        PatchError: neither has it.
    """
    checkout = Path(__file__).resolve().parents[2] / _SERIES
    installed = Path(sysconfig.get_path("data")) / "share" / "sglang-replayssm" / _SERIES
    for folder in (checkout, installed):
        if folder.is_dir():
            return folder
    raise PatchError(f"the patch series is neither in {checkout} nor in {installed}; give its folder with --series")


def find_package(directory: Path) -> Path:
    """The `sglang` package in a git checkout, in its `python` folder, in a site-packages folder, or itself.

    Raises:
        PatchError: there is none.
    """
    for package in (directory / "python" / "sglang", directory / "sglang", directory):
        if (package / "srt" / "server_args.py").is_file():
            return package
    raise PatchError(f"{directory} holds no SGLang: srt/server_args.py is not in it, in sglang or in python/sglang")


@dataclass(frozen=True)
class Tree:
    """A source tree and the series.

    Attributes:
        package: folder of its `sglang` package.
        diffs: all files of the series, each at most once.
    """

    package: Path
    diffs: tuple[FileDiff, ...]

    @classmethod
    def open(cls, directory: Path, series: Path | None = None) -> Tree:
        """The tree in `directory`, with the series of the pin unless another folder is given."""
        patches = sorted((series or find_series()).glob("*.patch"))
        diffs = tuple(diff for patch in patches for diff in read_patch(patch))
        if not diffs or len({diff.path for diff in diffs}) < len(diffs):
            raise PatchError("the series is empty, or two of its patches change the same file")
        return cls(find_package(directory), diffs)

    def hunks(self) -> list[tuple[Hunk, State]]:
        """Every hunk of the series and its state here."""
        return [entry for diff in self.diffs for entry in diff.states(self._read(diff))]

    def state(self) -> TreeState:
        found = {state for _, state in self.hunks()}
        if found == {State.PENDING}:
            return TreeState.UNPATCHED
        return TreeState.PATCHED if found == {State.APPLIED} else TreeState.DIFFERS

    def problems(self, reverse: bool = False) -> list[str]:
        """What keeps the series from being applied (or reversed) here; empty if nothing does."""
        wanted = State.APPLIED if reverse else State.PENDING
        bad = [f"{hunk.title} is {state.value}" for hunk, state in self.hunks() if state is not wanted]
        return bad if reverse else [*self._other_version(), *bad]

    def apply(self) -> bool:
        """Apply the whole series; False if it already is.

        Raises:
            PatchError: another version, or local changes at these places.
        """
        return self._change(TreeState.PATCHED, reverse=False)

    def reverse(self) -> bool:
        """Take the whole series back, byte for byte; False if it is not applied.

        Raises:
            PatchError: local changes at these places.
        """
        return self._change(TreeState.UNPATCHED, reverse=True)

    def _change(self, goal: TreeState, reverse: bool) -> bool:
        if self.state() is goal:
            return False
        problems = self.problems(reverse)
        if problems:
            raise PatchError("\n".join(problems))
        contents = {self._path(diff): diff.changed(self._read(diff), reverse) for diff in self.diffs}
        _replace_all(contents)
        return True

    def _other_version(self) -> list[str]:
        """How this tree differs from the pin: by its version file, which a checkout lacks, and at every seam."""
        with contextlib.suppress(OSError):
            text = (self.package / "_version.py").read_text(encoding="utf-8")
            found = re.search(r"^__version__ = (?:version = )?['\"]([^'\"]+)", text, re.MULTILINE)
            if found and found[1] != seams.PINNED_SGLANG:
                return [f"this tree is SGLang {found[1]}; the series is for {seams.PINNED_SGLANG}"]
        return [
            f"{seam.target} {status.value}: not as in {seams.PINNED_SGLANG}"
            for seam in seams.SEAMS
            if (status := seams.status_in(seams.read_module(self.package, seam.module), seam))
            not in (seams.Status.OK, seams.Status.PATCHED)
        ]

    def _path(self, diff: FileDiff) -> Path:
        return (self.package / diff.path).resolve()

    def _read(self, diff: FileDiff) -> bytes | None:
        path = self._path(diff)
        return path.read_bytes() if path.is_file() else None


def _replace_all(contents: dict[Path, bytes | None]) -> None:
    """Give every file its new content (None: remove it), or leave all as they were.

    Files are replaced, never written into: installers link them to a cache that other environments share.
    """
    staged: dict[Path, Path] = {}
    kept: dict[Path, Path] = {}
    done: list[Path] = []
    try:
        for path, content in contents.items():
            if path.exists():
                kept[path] = _beside(path)
                shutil.copy2(path, kept[path])
            if content is not None:
                staged[path] = _beside(path)
                staged[path].write_bytes(content)
                if path.exists():
                    shutil.copymode(path, staged[path])
                else:
                    staged[path].chmod(0o644)
        for path in contents:
            if path in staged:
                os.replace(staged[path], path)
            else:
                path.unlink()
            done.append(path)
    except BaseException:
        for path in done:
            if path in kept:
                os.replace(kept[path], path)
            else:
                path.unlink()
        raise
    finally:
        for leftover in (*staged.values(), *kept.values()):
            leftover.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".replayssm", dir=path.parent)
    os.close(handle)
    return Path(name)
