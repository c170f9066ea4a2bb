"""Copies of the installed pin, in the layouts that the tool meets."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="the series is for an SGLang")

from sglang_replayssm.patching.tree import Tree
from sglang_replayssm.plugin import seams

LAYOUTS = {"checkout": Path("python/sglang"), "site-packages": Path("sglang"), "package": Path()}


@pytest.fixture(params=LAYOUTS)
def directory(request, tmp_path) -> Path:
    """A folder to give to the tool, with the files that the seams and the series need."""
    return copy_pin(tmp_path / "tree", LAYOUTS[request.param])


@pytest.fixture
def tree(tmp_path) -> Tree:
    return Tree.open(copy_pin(tmp_path / "tree", LAYOUTS["checkout"]))


def copy_pin(directory: Path, layout: Path) -> Path:
    root = seams.sglang_root()
    paths = {Path("_version.py")}
    for seam in seams.SEAMS:
        stem = Path(*seam.module.split(".")[1:])
        paths.add(next(p for p in (stem.with_suffix(".py"), stem / "__init__.py") if (root / p).is_file()))
    for path in paths:
        target = directory / layout / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / path, target)
    return directory
