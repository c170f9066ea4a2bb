"""Links, anchors, paths and names of tests in the documentation lead somewhere. Addresses outside are not looked up."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for either of pytest's import modes
from doc_pages import ROOT, Page, all_pages

PAGES = list(all_pages())
PACKAGE = ROOT / "sglang_replayssm"

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def broken_links(page: Page) -> list[str]:
    return [link for link in page.links if not link.startswith(("https://", "http://")) and not _leads(page, link)]


def _leads(page: Page, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.path.parent / path).resolve() if path else page.path
    if not target.exists() or ROOT not in (target, *target.parents):
        return False
    return not anchor or (target.suffix == ".md" and anchor in (Page(target) if path else page).anchors)


def stale_paths(page: Page) -> list[str]:
    """Code spans that are paths in the repository, or below the package, and do not exist."""
    tops = {entry.name for folder in (ROOT, PACKAGE) for entry in folder.iterdir() if entry.is_dir()} - {"results"}
    paths = [span for span in page.code_spans if re.fullmatch(r"[\w.-]+(/[\w.*-]*)+", span)]
    return [path for path in paths if path.split("/")[0] in tops and not _exists(path)]


def _exists(path: str) -> bool:
    return any(next(folder.glob(path), None) for folder in (ROOT, PACKAGE))


def unknown_tests(page: Page) -> list[str]:
    """Names of tests and test files that do not exist."""
    names = [span for span in page.code_spans if re.fullmatch(r"test_\w+(\.py)?", span)]
    return [name for name in names if name not in _tests()]


@functools.cache
def _tests() -> set[str]:
    files = list((ROOT / "tests").rglob("test_*.py"))
    functions = re.findall(r"def (test_\w+)", "\n".join(file.read_text(encoding="utf-8") for file in files))
    return {file.name for file in files} | set(functions)


@each_page
def test_links(page):
    assert broken_links(page) == []


@each_page
def test_paths(page):
    assert stale_paths(page) == []


@each_page
def test_names_of_tests(page):
    assert unknown_tests(page) == []


def test_every_page_of_docs_is_in_its_index():
    index = next(page for page in PAGES if page.name == "docs/README.md")
    assert {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(index.links)


def test_what_leads_nowhere_is_noticed():
    text = """
# A title: `code`, and (more)
[ok](README.md) [ok](README.md#check) [ok](#a-title-code-and-more) [ok](https://example.org/x#y)
[no](no-such-file.md) [no](README.md#no-such-heading) [no](#no-such-heading) [no](../README.md) `[code](not-a-link)`
`scripts/demo.py` `kernels/ring.py` `tests/no_such/file.py` `test_links` `test_no_such_test` `test_links.py`
"""
    page = Page(ROOT / "README.md")
    page.__dict__["lines"] = text.splitlines()
    assert broken_links(page) == ["no-such-file.md", "README.md#no-such-heading", "#no-such-heading", "../README.md"]
    assert stale_paths(page) == ["tests/no_such/file.py"]
    assert unknown_tests(page) == ["test_no_such_test"]
