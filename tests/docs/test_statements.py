"""What the documentation quotes or computes is so: log lines, reasons, errors, reported fields, memory, the figure."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for either of pytest's import modes
from doc_pages import ROOT, Page

from sglang_replayssm.kernels import RingSpec
from sglang_replayssm.policies import POLICIES

OPERATING = Page(ROOT / "docs" / "operating.md")
PLUGIN = ROOT / "sglang_replayssm" / "plugin"
SAYING = ("debug", "info", "warning", "error", "print")


def section(page: Page, heading: str) -> list[str]:
    """Lines below a heading, up to the next of any level."""
    start = page.lines.index(heading) + 1
    end = next((n for n in range(start, len(page.lines)) if page.lines[n].startswith("#")), len(page.lines))
    return page.lines[start:end]


def first_cells(page: Page, heading: str) -> list[str]:
    """First column of the tables in a section, without their heads."""
    rows = [line.split("|")[1].strip() for line in section(page, heading) if line.startswith("|")]
    rules = [n for n, row in enumerate(rows) if set(row) <= set("-: ")]
    return [row for n, row in enumerate(rows) if n not in rules and n + 1 not in rules]


def said(tree: ast.AST) -> Iterator[ast.expr]:
    """The texts that a module logs, prints or raises."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if node.args and (name in SAYING or name.endswith("Error")):
                yield node.args[0]


def pattern(text: ast.expr) -> str:
    """A regular expression for what an expression may print; "" if it cannot be told."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return re.sub(r"%(\\?\.\d)?[sdf]", ".*", re.escape(text.value))
    if isinstance(text, ast.JoinedStr):
        return "".join(pattern(part) if isinstance(part, ast.Constant) else ".*" for part in text.values)
    if isinstance(text, ast.BinOp) and isinstance(text.op, ast.Add):
        return (pattern(text.left) or ".*") + (pattern(text.right) or ".*")
    return ".*"


def patterns(*files: Path) -> list[str]:
    found = [pattern(text) for file in files for text in said(ast.parse(file.read_text(encoding="utf-8")))]
    return [regex for regex in found if len(regex.replace(".*", "")) > 8]


def is_logged(line: str) -> bool:
    regexes = patterns(*PLUGIN.glob("*.py"), PLUGIN.parent / "cli.py")
    return any(re.fullmatch(regex, line) for regex in regexes)


@pytest.mark.parametrize(
    "line", [line for block in OPERATING.blocks if block.language == "log" for line in block.text.splitlines()]
)
def test_quoted_lines_are_what_is_logged(line):
    assert is_logged(line)


def test_a_line_that_nobody_logs_is_noticed():
    assert is_logged("GDN ReplaySSM verify kernel: portable Triton")
    assert not is_logged("GDN ReplaySSM verify kernels: portable Triton")


@pytest.mark.parametrize("message", [cell.strip("`") for cell in first_cells(OPERATING, "## Errors")])
def test_errors_are_what_is_raised(message):
    """The beginning of a message, its values replaced by dots."""
    from sglang_replayssm.plugin.flags import CACHE_LEN, ENABLE, FOLD

    source = "\n".join(patterns(*PLUGIN.glob("*.py")))
    options = "|".join(re.escape(flag.option) for flag in (ENABLE, CACHE_LEN, FOLD))
    parts = [part for part in re.split(rf"{options}|\.\.\.", message) if len(part.strip(" =:")) > 3]
    assert parts
    for part in parts:
        assert re.escape(part.strip(" =:")) in source, part


def reasons() -> list[str]:
    """The words of every reason of `plugin/support.py`: of each the first piece that is more than a particle."""
    tree = ast.parse((PLUGIN / "support.py").read_text(encoding="utf-8"))
    texts: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "append":
            texts += node.args
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.List):
            texts += node.value.elts
    pieces = [re.split(r"\.\*|\\?[(;:]", pattern(text)) for text in texts]
    return [words(next((piece for piece in found if len(piece) > 6), found[-1])) for found in pieces]


def words(text: str) -> str:
    """Lower-case words alone, joined by single spaces."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def test_every_reason_has_a_row():
    from sglang_replayssm.plugin.support import OPTIONS_WITHOUT_RING

    cells = [words(cell) for cell in first_cells(OPERATING, "## When the ring is not used")]
    found = reasons()
    assert len(found) >= 12
    for reason in [*found, *map(words, OPTIONS_WITHOUT_RING)]:
        assert any(reason in cell for cell in cells), reason


@pytest.mark.parametrize("cell", first_cells(OPERATING, "## When the ring is not used"))
def test_every_row_is_a_reason(cell):
    """A reason that is gone takes its row with it."""
    source = words((PLUGIN / "support.py").read_text() + (PLUGIN / "activation.py").read_text())
    pieces = [*re.split(r"\.\.\.|`[^`]*`|[(),;]", cell), *re.findall(r"`([^`]*)`", cell)]
    for piece in pieces:
        assert words(piece) in source, piece


def test_reported_fields_are_documented():
    """Every field of the server's section, and no other."""
    tree = ast.parse((PLUGIN / "report.py").read_text(encoding="utf-8"))
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    fields = {key.value for key in keys if isinstance(key, ast.Constant)}
    from sglang_replayssm.kernels import Cursors

    fields |= set(Cursors.COUNTERS)
    cells = [name for cell in first_cells(OPERATING, "## Check") for name in re.findall(r"`(\w+)`", cell)]
    assert set(cells) == fields


def ring_mib(policy: str, drafts: int, window: int) -> float:
    sizes = {"num_k_heads": 16, "num_v_heads": 32, "head_k_dim": 128, "head_v_dim": 128}
    spec = RingSpec(
        layers=30,
        rows=1,
        window=window,
        max_draft_tokens=drafts,
        activation_dtype=torch.bfloat16,
        fold=policy,
        **sizes,
    )
    return spec.bytes_per_row / 2**20


def test_memory_of_the_policies():
    page = Page(ROOT / "docs" / "choosing-a-policy.md")
    rows = [line.strip("| ").split(" | ") for line in section(page, "## What it takes") if re.match(r"\| \d", line)]
    assert len(rows) >= 6
    for drafts, window, *cells in rows:
        assert cells == [f"{ring_mib(policy, int(drafts), int(window)):.1f}" for policy in POLICIES]


def test_memory_of_the_policies_in_numerics():
    lines = section(Page(ROOT / "docs" / "numerics.md"), "### Cost and error")
    for policy in POLICIES:
        row = next(line for line in lines if line.startswith(f"| `{policy}`"))
        assert f"| {ring_mib(policy, 4, 16):.1f} MiB |" in row


def test_the_figure_is_the_scripts():
    script = runpy.run_path(str(ROOT / "scripts" / "draw_ring.py"))
    assert script["draw"]() == script["OUT"].read_text(encoding="utf-8"), "run scripts/draw_ring.py"
    words = " ".join(re.findall(r">([^<>]+)</text>", script["draw"]()))
    for said_there in ("write_pos = 6", "cache_base = 7", "fold", "R = W + T = 12"):
        assert said_there in words
