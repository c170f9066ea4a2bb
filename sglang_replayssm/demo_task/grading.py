"""How a model's text is judged: by its final answer, and line by line against the reference solution."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grade:
    """Judgement of one text.

    Attributes:
        correct: the final answer is there and right.
        exact: the text is the reference solution, every step of it.
        wrong_line: number of the first line that differs, from 0; None if `exact`.
        lines: lines of the reference solution.
    """

    correct: bool
    exact: bool
    wrong_line: int | None
    lines: int


def grade_text(text: str, solution: str, answer: int, stated: int | None) -> Grade:
    """Compare a text with the solution.

    Args:
        text: what the model wrote, without special tokens; blanks around it do not count.
        solution: the reference.
        answer: the right answer.
        stated: the answer that was found in `text`, None if there is none.
    """
    said, reference = text.strip().split("\n"), solution.strip().split("\n")
    exact = said == reference
    return Grade(stated == answer, exact, None if exact else _first_difference(said, reference), len(reference))


def _first_difference(said: list[str], reference: list[str]) -> int:
    for number, (a, b) in enumerate(zip(said, reference, strict=False)):
        if a != b:
            return number
    return min(len(said), len(reference))
