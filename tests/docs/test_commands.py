"""Every command that the documentation shows is understood by the program that it names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before SGLang is imported

pytest.importorskip("sglang", reason="the documented servers are SGLang's")

sys.path.insert(0, str(Path(__file__).parent))  # for either of pytest's import modes
from doc_commands import Misunderstood, check, command_lines, looks_like_command
from doc_pages import Block, Page, all_pages

PAGES = list(all_pages())
SHELL = "bash"
# `log`: lines that the package prints or logs, compared with its sources in test_statements.py.
OTHER_LANGUAGES = ("log", "text", "python", "json", "yaml")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("docs")


def commands() -> list:
    found = []
    for page in PAGES:
        blocks = (command_lines(block) for block in page.blocks if block.language == SHELL)
        lines = [(f"line {number}", text) for block in blocks for number, text in block]
        if page.name != "CHANGELOG.md":  # which names commands in short
            lines += [("in the text", span) for span in page.code_spans if looks_like_command(span)]
        found += [pytest.param(text, id=f"{page.name} {place}: {text[:60]}") for place, text in lines]
    return found


@pytest.mark.parametrize("command", commands())
def test_command(command, scratch):
    check(command, scratch)


def test_commands_are_found():
    """The main pages show commands of each kind; a change of the extraction must not make this file vacuous."""
    text = "\n".join(parameter.values[0] for parameter in commands())
    tools = ("pip install", "make test", "-m pytest", "sglang-replayssm check", "sglang-replayssm patch apply")
    for kind in (*tools, "launch_server", "scripts/launch.sh", "scripts/bench_verify.py", "scripts/eval_gsm8k.py"):
        assert kind in text, kind


@each_page
def test_no_code_block_escapes(page: Page):
    """Each block says what it is, and commands are in shell blocks."""
    for block in page.blocks:
        if block.language == "indented":
            hidden = [line for line in block.text.splitlines() if looks_like_command(line)]
            assert not hidden, f"{page.name}:{block.line}: put commands into a {SHELL} block"
        else:
            assert block.language in (SHELL, *OTHER_LANGUAGES), f"{page.name}:{block.line}: {block.language!r}"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("frobnicate --now", "no kind of command"),
        ("python scripts/bench_verify.py --no-such-option", "--no-such-option"),
        ("python scripts/bench_verify.py --variants replayssm,nonsense", "no such variant"),
        ("python scripts/eval_gsm8k.py --out", "expected one argument"),
        ("python scripts/study_fidelity.py stray", "unrecognized arguments: stray"),
        ("python scripts/no_such_script.py", "does not exist"),
        ("python scripts/compile_offline.py --verbose", "does not take"),
        ("python -m no.such.module", "nothing that this test knows"),
        ("python -c 'def'", "not Python"),
        ("python -m pytest tests/no_such_folder", "does not exist"),
        ("python -m pytest -m 'gpu and fast'", "no marker 'fast'"),
        ("python -m sglang_replayssm.demo_task poems > poems.jsonl", "invalid choice"),
        ("python -m pytest tests/kernels/test_gpu.py -k no_such_test", "is called"),
        ("python -m pytest --no-such-option", "--no-such-option"),
        ("make test no-such-target", "no-such-target"),
        ("pip install sglang==0.5.16", "0.5.16"),
        ("curl -s http://127.0.0.1:30000/no_such_path", "no such path"),
        ("sglang-replayssm chekc", "chekc"),
        ("sglang-replayssm check --verbose", "--verbose"),
        ("sglang-replayssm patch apply", "DIR"),
        ("scripts/launch.sh no-such-configuration", "no configuration"),
        ("scripts/launch.sh qwen3.5-35b-a3b --no-such-option", "--no-such-option"),
        ("python -m sglang.launch_server --model-path x --gdn-replayssm-fold fp16", "fp16"),
        ("python -m sglang.launch_server --model-path x --enable-gdn-replayssm-spec", "would not be used"),
        ("sglang serve --enable-gdn-replayssm-spec", "names no model"),
        ("make test | tee log", "can check"),
        ("make test && make no-such-target", "no-such-target"),
        ("PYTHONPATH=.", "no command"),
    ],
)
def test_a_wrong_command_is_noticed(command, words, scratch):
    with pytest.raises(Misunderstood, match=words):
        check(command, scratch)


def test_lines_are_joined_as_a_shell_joins_them():
    text = "a --b c,\\\n    d  # e\n\n# f\ng\n"
    assert list(command_lines(Block(SHELL, 7, text))) == [(7, "a --b c,    d  # e"), (11, "g")]
