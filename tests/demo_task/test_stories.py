"""The short task: solutions are right by an independent count, lengths hold, the grader misses no corruption."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from sglang_replayssm.demo_task import draw_story, vocabulary
from sglang_replayssm.demo_task.stories import Event, StoryProblem

stories = st.integers(0, 10**6).map(lambda index: draw_story("train", index))


def count(question: str) -> int:
    """The answer, from the sentences of the question alone."""
    amounts: dict[str, int] = {}
    for sentence in re.split(r"(?<=[a-z][.?]) ", question):
        words = re.sub(r"^\d\. ", "", sentence).rstrip(".?").split()
        if words[1] == "has":
            amounts[words[0]] = int(words[2])
        elif words[1] == "finds":
            amounts[words[0]] += int(words[2])
        elif words[1] in ("loses", "gives"):
            amounts[words[0]] -= int(words[2])
            if words[1] == "gives":
                amounts[words[5]] += int(words[2])
        else:
            asked = words[4]
    return sum(amounts.values()) if asked == "everyone" else amounts[asked]


@given(stories)
def test_the_answer_is_what_the_question_says(story):
    assert story.answer == count(story.question)
    assert story.solution.endswith(f"\n#### {story.answer}")


@given(stories)
def test_every_sum_of_the_solution_holds_and_stays_in_range(story):
    for before, sign, by, after in re.findall(r"(\d+)([+-])(\d+)=(\d+)", story.solution):
        assert int(after) == int(before) + int(sign + by)
        assert 0 <= int(after) <= 99


@given(stories)
def test_the_solution_is_graded_right(story):
    grade = story.grade(story.solution)
    assert grade.correct
    assert grade.exact


@given(stories, st.data())
def test_every_changed_digit_is_noticed(story, data):
    text = story.solution
    place = data.draw(st.sampled_from([m.start() for m in re.finditer(r"\d", text)]))
    changed = (int(text[place]) + data.draw(st.integers(1, 9))) % 10
    grade = story.grade(f"{text[:place]}{changed}{text[place + 1 :]}")
    assert not grade.exact
    assert grade.wrong_line == text[:place].count("\n")
    assert grade.correct == (place < text.index("####"))


@given(stories)
def test_lengths(story):
    assert 50 <= len(vocabulary.answer_ids(story.solution)) <= 300


def test_both_kinds_of_question_and_all_events_occur():
    drawn = [draw_story("test", index) for index in range(200)]
    assert {story.asked == "everyone" for story in drawn} == {True, False}
    text = " ".join(story.question for story in drawn)
    assert all(f" {verb} " in text for verb in ("finds", "loses", "gives"))


def test_a_story_by_hand():
    story = StoryProblem("apples", (("Tom", 12), ("Ann", 30)), (Event("Tom", 7), Event("Ann", 5, "Tom")), "everyone")
    assert story.question == (
        "Tom has 12 apples. Ann has 30 apples. 1. Tom finds 7 apples. 2. Ann gives 5 apples to Tom. "
        "How many apples does everyone have?"
    )
    assert story.solution.split("\n") == [
        "1. Tom finds 7: Tom 12+7=19.",
        "2. Ann gives 5 to Tom: Ann 30-5=25, Tom 19+5=24.",
        "everyone 24+25=49.",
        "#### 49",
    ]


def test_no_answer_is_wrong():
    story = draw_story("train", 0)
    assert not story.grade("").correct
    assert not story.grade(story.solution.replace("####", "")).correct
