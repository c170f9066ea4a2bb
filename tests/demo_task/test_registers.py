"""The long task: its solutions are right by an independent machine, its grader misses no corruption."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_replayssm.demo_task import RegisterProblem, draw_register, registers, vocabulary

LINE = re.compile(r"(\w)(\d)\+(\w)(\d)=(\w)(\d)")


@st.composite
def problems(draw, fewest=1, most=6):
    fast, slow = draw(st.integers(2, 16)), draw(st.integers(1, 26))
    return draw_register("train", draw(st.integers(0, 10**6)), draw(st.integers(fewest, most)), fast, slow)


def replay(problem: RegisterProblem) -> dict[str, int]:
    """Run the printed lines on registers of our own: every digit read must be what was last written."""
    values = dict(zip(string.ascii_lowercase, problem.fast, strict=False))
    values |= zip(string.ascii_uppercase, problem.slow, strict=False)
    for line in problem.solution.split("\n"):
        step = LINE.fullmatch(line)
        if step:
            target, before, source, other, again, after = step.groups()
            assert (values[target], values[source]) == (int(before), int(other))
            assert again == target
            assert int(after) == (values[target] + values[source]) % 10
            values[target] = int(after)
    return values


@given(problems())
def test_every_line_reads_what_was_written(problem):
    values = replay(problem)
    last_fast = string.ascii_lowercase[len(problem.fast) - 1]
    last_slow = string.ascii_uppercase[len(problem.slow) - 1]
    assert problem.answer == 100 * values["a"] + 10 * values[last_fast] + values[last_slow]


def test_a_round_by_hand():
    problem = RegisterProblem(fast=(9, 2, 7), slow=(6, 8), stride=1, rounds=1)
    assert problem.question == "Registers a9,b2,c7,A6,B8.\nb reads c. Rounds 001."
    assert problem.solution == "[001]\nA6+b2=A8\na9+A8=a7\nb2+c7=b9\nc7+a7=c4\na7,c4,B8\n\\boxed{748}"
    assert problem.answer == 748


@given(problems())
def test_the_solution_is_graded_right(problem):
    grade = problem.grade(problem.solution)
    assert grade.correct
    assert grade.exact
    assert grade.wrong_line is None


@given(problems(), st.data())
def test_every_changed_digit_is_noticed(problem, data):
    """Of a step, a round number, the read-out or the box: never exact, and the box decides what is correct."""
    text = problem.solution
    place = data.draw(st.sampled_from([m.start() for m in re.finditer(r"\d", text)]))
    changed = (int(text[place]) + data.draw(st.integers(1, 9))) % 10
    grade = problem.grade(f"{text[:place]}{changed}{text[place + 1 :]}")
    assert not grade.exact
    assert grade.wrong_line == text[:place].count("\n")
    assert grade.correct == (place < text.index("\\boxed"))


@given(problems(2, 5), st.data())
def test_every_lost_or_doubled_line_is_noticed(problem, data):
    lines = problem.solution.split("\n")
    place = data.draw(st.integers(0, len(lines) - 1))
    if lines[place] in (lines[place - 1], lines[min(place + 1, len(lines) - 1)]):
        return
    assert not problem.grade("\n".join(lines[:place] + lines[place + 1 :])).exact
    assert not problem.grade("\n".join(lines[: place + 1] + lines[place:])).exact


@given(problems(20, 40), st.data())
@settings(max_examples=50)
def test_a_wrong_register_never_heals(problem, data):
    """Two machines that differ in one register differ in some register after any number of rounds."""
    name = data.draw(st.sampled_from(["fast", "slow"]))
    values = list(getattr(problem, name))
    place = data.draw(st.integers(0, len(values) - 1))
    values[place] = (values[place] + data.draw(st.integers(1, 9))) % 10
    other = RegisterProblem(**{**vars(problem), name: tuple(values)})
    assert replay(problem) != replay(other)


def test_a_wrong_register_spreads_over_the_machine():
    """After 20 rounds about nine in ten digits are others, so whoever goes on from it is wrong nearly everywhere."""
    different = []
    for index in range(20):
        problem = draw_register("train", index, rounds=20)
        fast = (*problem.fast[:5], (problem.fast[5] + 1) % 10, *problem.fast[6:])
        wrong = RegisterProblem(fast, problem.slow, problem.stride, problem.rounds)
        said, other = (list(p.pieces())[19].split("\n")[1:-1] for p in (problem, wrong))
        different += [a != b for a, b in zip(said, other, strict=True)]
    assert sum(different) / len(different) > 0.8


@pytest.mark.parametrize(("low", "high"), [(4_000, 16_000), (31_000, 32_768)])
def test_lengths(low, high):
    for tokens in (low + 159, (low + high) // 2, high):
        rounds = registers.rounds_within(tokens)
        problem = draw_register("test", 0, rounds)
        length = len(vocabulary.encode(problem.solution))
        assert low <= length <= tokens
        assert length == registers.solution_tokens(rounds)
        assert registers.solution_tokens(rounds + 1) > tokens
        assert len(vocabulary.encode(problem.question)) == registers.question_tokens()


@pytest.mark.parametrize(
    "change",
    [{"stride": 0}, {"stride": 16}, {"stride": 4}, {"rounds": 0}, {"rounds": 1000}, {"fast": (10,) * 16}, {"slow": ()}],
)
def test_impossible_machines_are_refused(change):
    problem = draw_register("train", 0, 1)
    with pytest.raises(ValueError, match="not a register problem"):
        RegisterProblem(**{**vars(problem), **change})


@pytest.mark.parametrize("text", ["", "\\boxed{}", "\\boxed{12}", "748"])
def test_no_answer_is_wrong(text):
    assert not draw_register("train", 0, 1).grade(text).correct
