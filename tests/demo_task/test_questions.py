"""The JSONL of questions: the evaluation scripts read it, and find the answers in reference solutions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_replayssm.demo_task import draw_register, draw_story, registers
from sglang_replayssm.demo_task.__main__ import main

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from evaluation import answers, data


def test_stories(tmp_path, capsys):
    assert main(["stories", "--count", "20"]) == 0
    file = tmp_path / "stories.jsonl"
    file.write_text(capsys.readouterr().out)
    for index, question in enumerate(data.from_jsonl(file, answers.gsm8k)):
        story = draw_story("test", index)
        assert (question.text, question.reference) == (story.question, story.answer)
        assert answers.gsm8k(story.solution) == question.reference


def test_registers(tmp_path, capsys):
    assert main(["registers", "--count", "5", "--tokens", "4096", "--split", "validation"]) == 0
    file = tmp_path / "registers.jsonl"
    file.write_text(capsys.readouterr().out)
    for index, question in enumerate(data.from_jsonl(file, answers.number)):
        problem = draw_register("validation", index, registers.rounds_within(4096))
        assert (question.text, question.reference) == (problem.question, problem.answer)
        assert answers.aime(problem.solution) == question.reference


@pytest.mark.parametrize("tokens", ["100", "1000000"])
def test_impossible_lengths_are_refused(tokens, capsys):
    with pytest.raises(SystemExit):
        main(["registers", "--tokens", tokens])
    assert "--tokens" in capsys.readouterr().err
