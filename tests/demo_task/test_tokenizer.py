"""The tokenizer's files against the vocabulary that training uses, and the chat template."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_replayssm.demo_task import draw_register, draw_story, vocabulary
from sglang_replayssm.demo_task.tokenizer import write_tokenizer

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return transformers.AutoTokenizer.from_pretrained(directory)


PROBLEMS = [draw_register("test", 0, 3), *(draw_story("test", index) for index in range(30))]


@pytest.mark.parametrize("problem", PROBLEMS, ids=range(len(PROBLEMS)))
def test_text_survives_and_the_files_agree_with_the_vocabulary(tokenizer, problem):
    for text in (problem.question, problem.solution):
        ids = vocabulary.encode(text)
        assert vocabulary.IDS[vocabulary.UNKNOWN] not in ids
        assert vocabulary.decode(ids) == text
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text


@given(text=st.text(alphabet="ab Tom1+=\n[#}~é\t", max_size=30))
def test_any_text_is_split_alike(tokenizer, text):
    assert tokenizer.encode(text) == vocabulary.encode(text)


def test_the_chat_template_makes_the_prompt_of_training(tokenizer):
    """Blanks around a message do not count: evaluation scripts put an instruction behind the question."""
    for problem in PROBLEMS:
        messages = [{"role": "user", "content": problem.question + "\n\n"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(ids) == vocabulary.prompt_ids(problem.question)


def test_a_whole_conversation(tokenizer):
    story = PROBLEMS[1]
    messages = [{"role": "user", "content": story.question}, {"role": "assistant", "content": story.solution}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert list(ids) == vocabulary.prompt_ids(story.question) + vocabulary.answer_ids(story.solution)
    assert tokenizer.decode(ids, skip_special_tokens=True) == story.question + story.solution


def test_the_vocabulary_fits():
    assert len(vocabulary.TOKENS) == len(set(vocabulary.TOKENS)) <= vocabulary.VOCAB_SIZE
