"""The short task: who has how many, after a few events; solved in steps, the answer behind `####` as in GSM8K.

    Tom has 12 apples. Ann has 30 apples. 1. Tom finds 7 apples. 2. Ann gives 5 apples to Tom. How many apples does
    Tom have?

    1. Tom finds 7: Tom 12+7=19.
    2. Ann gives 5 to Tom: Ann 30-5=25, Tom 19+5=24.
    #### 24

All amounts lie between 0 and 99.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from sglang_replayssm.demo_task.grading import Grade, grade_text

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Lea", "Sam", "Mia", "Leo", "Ida", "Kim", "Noa", "Jan", "Zoe", "Tim", "Amy")
ITEMS = ("apples", "books", "coins", "cards", "pears", "stones", "stamps", "pens", "shells", "nuts", "keys", "cups")
TOTAL = "everyone"
LIMIT = 99

_ANSWER = re.compile(r"#### ?(\d+)")


@dataclass(frozen=True)
class Event:
    """`who` finds (positive) or loses (negative) an amount, or gives it `to` somebody (positive)."""

    who: str
    amount: int
    to: str | None = None

    def sentence(self, item: str = "") -> str:
        """Without an item, as the solution says it."""
        amount = f"{abs(self.amount)} {item}".rstrip()
        if self.to:
            return f"{self.who} gives {amount} to {self.to}"
        return f"{self.who} {'finds' if self.amount > 0 else 'loses'} {amount}"


@dataclass(frozen=True)
class StoryProblem:
    """One story.

    Attributes:
        item: what is counted.
        start: (name, amount) of every person.
        events: what happens, in order.
        asked: whose amount, or `TOTAL` for the sum over all persons.
    """

    item: str
    start: tuple[tuple[str, int], ...]
    events: tuple[Event, ...]
    asked: str

    @property
    def question(self) -> str:
        """The user's turn."""
        sentences = [f"{name} has {amount} {self.item}." for name, amount in self.start]
        sentences += [f"{n}. {event.sentence(self.item)}." for n, event in enumerate(self.events, start=1)]
        return " ".join([*sentences, f"How many {self.item} does {self.asked} have?"])

    @property
    def solution(self) -> str:
        """The assistant's turn, without a final newline."""
        return self._solve()[0]

    @property
    def answer(self) -> int:
        """The number behind `####`."""
        return self._solve()[1]

    def grade(self, text: str) -> Grade:
        """Judge a model's text; `correct` looks at the number behind the last `####` alone."""
        stated = _ANSWER.findall(text)
        return grade_text(text, self.solution, self.answer, int(stated[-1]) if stated else None)

    def _solve(self) -> tuple[str, int]:
        amounts = dict(self.start)
        lines = []
        for number, event in enumerate(self.events, start=1):
            changes = (
                [(event.who, -event.amount), (event.to, event.amount)] if event.to else [(event.who, event.amount)]
            )
            sums = []
            for name, by in changes:
                sums.append(f"{name} {amounts[name]}{by:+d}={amounts[name] + by}")
                amounts[name] += by
            lines.append(f"{number}. {event.sentence()}: {', '.join(sums)}.")
        if self.asked == TOTAL:
            answer, *others = amounts.values()
            for amount in others:
                lines.append(f"{TOTAL} {answer}+{amount}={answer + amount}.")
                answer += amount
        else:
            answer = amounts[self.asked]
        return "\n".join([*lines, f"#### {answer}"]), answer


def random_story(rng: random.Random) -> StoryProblem:
    """Two to four persons and three to six events; no amount, the total included, leaves 0 to 99."""
    names = rng.sample(NAMES, rng.randint(2, 4))
    amounts = {name: rng.randint(2, LIMIT // len(names)) for name in names}
    start = tuple(amounts.items())
    events = tuple(_random_event(rng, amounts) for _ in range(rng.randint(3, 6)))
    return StoryProblem(rng.choice(ITEMS), start, events, rng.choice([*names, TOTAL]))


def _random_event(rng: random.Random, amounts: dict[str, int]) -> Event:
    """An event that the amounts allow, carried out on them."""
    able = [name for name, amount in amounts.items() if amount >= 2]
    room = LIMIT - sum(amounts.values())
    kinds = (["find"] if room >= 2 else []) + (["lose", "give"] if able else [])
    kind = rng.choice(kinds)
    if kind == "find":
        who = rng.choice(list(amounts))
        event = Event(who, rng.randint(2, room))
        amounts[who] += event.amount
        return event
    who = rng.choice(able)
    amount = rng.randint(2, amounts[who])
    amounts[who] -= amount
    if kind == "lose":
        return Event(who, -amount)
    to = rng.choice([name for name in amounts if name != who])
    amounts[to] += amount
    return Event(who, amount, to)
