"""The repository's Markdown pages, taken apart as far as the tests need it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Block:
    """A code block: language ("" if none is named, "indented" without a fence), first line's number, and text."""

    language: str
    line: int
    text: str


@dataclass(frozen=True)
class Page:
    path: Path

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines()

    @cached_property
    def _parts(self) -> tuple[list[Block], list[str]]:
        """Code blocks, and the lines outside of them (blank where a block was)."""
        blocks, prose, at = [], [], 0
        while at < len(self.lines):
            line, start = self.lines[at], at
            if fence := re.match(r" *(```+|~~~+) *(\S*)", line):
                end = next(n for n in range(at + 1, len(self.lines)) if self.lines[n].strip() == fence[1])
                blocks.append(Block(fence[2], at + 2, "\n".join(self.lines[at + 1 : end])))
                at = end + 1
            elif line.startswith("    ") and (at == 0 or not self.lines[at - 1].strip()):
                while at < len(self.lines) and (self.lines[at].startswith("    ") or not self.lines[at].strip()):
                    at += 1
                text = "\n".join(found[4:] for found in self.lines[start:at])
                blocks.append(Block("indented", start + 1, text))
            else:
                prose.append(line)
                at += 1
                continue
            prose += [""] * (at - start)
        return blocks, prose

    @property
    def blocks(self) -> list[Block]:
        return self._parts[0]

    @cached_property
    def code_spans(self) -> list[str]:
        """Inline code, line breaks in it as spaces."""
        return [re.sub(r"\s+", " ", span) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", "\n".join(self._parts[1]))]

    @cached_property
    def links(self) -> list[str]:
        """Targets of links and images."""
        prose = re.sub(r"`[^`]*`", "code", "\n".join(self._parts[1]))
        return re.findall(r"\]\(([^()\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)

    @cached_property
    def anchors(self) -> set[str]:
        """What GitHub makes of the headings."""
        seen: Counter[str] = Counter()
        anchors = set()
        for line in self._parts[1]:
            if heading := re.match(r"#{1,6} +(.*?) *#*$", line):
                text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
                slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
                anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
                seen[slug] += 1
        return anchors


def all_pages() -> Iterator[Page]:
    """Every page of the repository."""
    yield from (Page(path) for path in sorted(ROOT.glob("*.md")))
    for folder in ("configs", "docs", "patches", "scripts", "tests"):
        yield from (Page(path) for path in sorted((ROOT / folder).rglob("*.md")))
