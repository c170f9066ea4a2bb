"""Questions with their reference answers: a local JSONL file, or a public data set through `datasets`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

_QUESTION_FIELDS = ("question", "problem", "prompt")


@dataclass(frozen=True)
class Question:
    id: str
    text: str
    reference: Fraction


@dataclass(frozen=True)
class Source:
    """A data set on the Hugging Face hub."""

    path: str
    name: str | None
    split: str


def from_jsonl(path: Path, parse: Callable[[str], Fraction | None]) -> list[Question]:
    """One object a line: `question` (or `problem`, `prompt`), `answer`, and optionally `id`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return _questions((json.loads(line) for line in lines if line.strip()), parse, str(path))


def from_hub(source: Source, parse: Callable[[str], Fraction | None]) -> list[Question]:
    """The same from the hub.

    Raises:
        SystemExit: `datasets` is not installed, or the data set cannot be reached.
    """
    try:
        import datasets
    except ImportError:
        raise SystemExit("`datasets` is not installed: pip install datasets, or give a file with --data") from None
    try:
        rows = datasets.load_dataset(source.path, source.name, split=source.split)
    except Exception as error:  # the library raises many kinds, and all mean the same to the user
        raise SystemExit(f"cannot load {source.path}: {error}\nGive a local file with --data") from error
    return _questions(rows, parse, source.path)


def _questions(rows: Iterable[dict[str, Any]], parse: Callable, where: str) -> list[Question]:
    questions = []
    for index, row in enumerate(rows):
        text = next((row[field] for field in _QUESTION_FIELDS if row.get(field)), None)
        reference = parse(str(row["answer"])) if row.get("answer") is not None else None
        if text is None or reference is None:
            raise SystemExit(f"{where}, question {index}: no question or no numeric answer in {sorted(row)}")
        questions.append(Question(str(row.get("id", index)), text, reference))
    if len({question.id for question in questions}) != len(questions):
        raise SystemExit(f"{where}: ids are not unique")
    return questions
