"""The result file: a line that describes the run, then one line for each answer. It is also what a run resumes from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evaluation.loops import LONG_LOOP, LOOP


@dataclass(frozen=True)
class Record:
    """One answer.

    Attributes:
        id, repeat: which question, and which of its repeats.
        reference, answer: exact numbers as text; answer is None where none was found.
        truncated: the server stopped at the token limit.
        loop_repeats: repetitions of the most repeated block, 0 below 50.
        verify_steps: steps of speculative decoding, None where the server does not tell.
        reasoning: thinking that the server parsed out of the text.
    """

    id: str
    repeat: int
    reference: str
    answer: str | None
    correct: bool
    finish_reason: str | None
    truncated: bool
    loop_repeats: int
    prompt_tokens: int
    completion_tokens: int
    verify_steps: int | None
    seconds: float
    text: str
    reasoning: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.id, self.repeat

    @property
    def loops(self) -> bool:
        return self.loop_repeats >= LOOP

    @property
    def loops_long(self) -> bool:
        return self.loop_repeats >= LONG_LOOP


def acceptance_length(records: Iterable[Record]) -> float | None:
    """Tokens a verify step, over all of the records; None if the server told no steps."""
    told = [record for record in records if record.verify_steps]
    return sum(r.completion_tokens for r in told) / sum(r.verify_steps for r in told) if told else None


def outcomes(records: Iterable[Record]) -> dict[str, list[bool]]:
    """For each question whether its repeats are right, repeats in order."""
    result: dict[str, list[bool]] = {}
    for record in sorted(records, key=lambda r: r.key):
        result.setdefault(record.id, []).append(record.correct)
    return result


class ResultFile:
    """JSON lines on disk, flushed answer by answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run: dict[str, Any] = {}
        self.records: list[Record] = []
        if path.exists():
            self._read()

    def _read(self) -> None:
        for line in self.path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):  # cut off when the run was killed
                break
            entry = json.loads(line)
            if "run" in entry:
                self.run = entry["run"]
            else:
                self.records.append(Record(**entry))

    def begin(self, settings: dict[str, Any], server: dict[str, Any]) -> None:
        """Start the file, or resume it.

        Raises:
            ValueError: the file holds answers that were made with other settings.
        """
        if self.run:
            old = self.run["settings"]
            changed = [name for name in sorted(settings | old) if settings.get(name) != old.get(name)]
            if changed:
                described = "; ".join(f"{name}: {old.get(name)!r}, now {settings.get(name)!r}" for name in changed)
                raise ValueError(f"{self.path} was made with other settings ({described}): choose another --out")
        else:
            self.run = {"settings": settings, "server": server}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Written anew without the line that was cut off, and moved into place whole.
        draft = self.path.with_name(self.path.name + ".tmp")
        entries = [{"run": self.run}, *map(asdict, self.records)]
        draft.write_text("".join(_line(entry) for entry in entries), encoding="utf-8")
        draft.replace(self.path)

    def append(self, record: Record) -> None:
        self.records.append(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(asdict(record)))


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"
