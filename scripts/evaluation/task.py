"""What distinguishes one benchmark from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from evaluation.data import Question, Source

Message = dict[str, str]


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        instruction: follows the question in every prompt.
        exemplars: worked questions; `--shots` of them go first, as turns of the conversation.
        extract: the answer in a solution.
        parse_reference: the answer in the data set.
        max_tokens: default of --max-tokens.
    """

    name: str
    source: Source
    instruction: str
    extract: Callable[[str], Fraction | None]
    parse_reference: Callable[[str], Fraction | None]
    max_tokens: int
    exemplars: tuple[tuple[str, str], ...] = ()

    def messages(self, question: Question, shots: int) -> list[Message]:
        """The conversation whose next turn is the answer; the server applies the model's chat template."""
        turns = []
        for asked, solved in self.exemplars[:shots]:
            turns += [self._user(asked), {"role": "assistant", "content": solved}]
        return [*turns, self._user(question.text)]

    def _user(self, question: str) -> Message:
        return {"role": "user", "content": f"{question}\n\n{self.instruction}"}
