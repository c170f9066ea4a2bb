"""The evaluation scripts from command line to result file and comparison, against a server in this process."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS), str(Path(__file__).resolve().parent)]

from evaluation import run  # noqa: E402
from evaluation.records import ResultFile, acceptance_length  # noqa: E402
from fake_server import INFO, FakeServer  # noqa: E402

QUESTIONS = [{"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"} for n in range(12)]


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GSM8K = script("eval_gsm8k").GSM8K
AIME = script("eval_aime").AIME
compare = script("compare_evals")


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def files(tmp_path):
    """A data file, and where results go."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return data, tmp_path / "results" / "out.jsonl"


def operand(prompt: str) -> int:
    return int(prompt.split()[2])


def right(prompt: str) -> str:
    return f"Adding gives\n#### {2 * operand(prompt)}"


def evaluate(server: FakeServer, files, *extra: str, task=GSM8K) -> int:
    data, out = files
    return run.main(task, "test", ["--url", server.url, "--data", str(data), "--out", str(out), *extra])


def test_gsm8k(files, capsys):
    def reply(prompt):
        n = operand(prompt)
        if n == 3:
            return {"content": "Wait. " * 80, "finish_reason": "length", "tokens": 240, "steps": 60}
        if n == 4:
            return {"content": "#### 8", "reasoning_content": "hmm, " * 210}
        return "#### 1" if n == 5 else right(prompt)

    with FakeServer(reply) as server:
        assert evaluate(server, files, "--concurrency", "4", "--shots", "2") == 0
    assert 1 < server.most_under_way <= 4
    body = server.requests[0]
    assert [m["role"] for m in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert body["temperature"] == 0 and body["max_tokens"] == 2048 and body["model"] == "fake"

    results = ResultFile(files[1])
    records = {record.id: record for record in results.records}
    assert len(records) == 12 and sum(r.correct for r in records.values()) == 10
    looped = records["3"]
    assert (looped.answer, looped.truncated, looped.loop_repeats) == (None, True, 80)
    assert looped.loops and not looped.loops_long and records["4"].loops_long and records["4"].correct
    assert records["5"].answer == "1" and records["5"].reference == "10"
    assert acceptance_length(results.records) == pytest.approx((11 * 12 + 240) / (11 * 4 + 60))
    assert results.run["server"]["ring"] == {"active": True, "reasons": []}
    assert INFO["api_key"] not in files[1].read_text()
    assert "0.8333" in capsys.readouterr().out


def test_aime_with_repeats_and_sampling(files):
    with FakeServer(lambda prompt: f"<think>\\boxed{{1}}</think>so \\boxed{{{2 * operand(prompt):03}}}") as server:
        data, _ = files
        data.write_text('{"problem": "What is 21 plus 21?", "answer": "042", "id": "I-1"}\n')
        arguments = ["--repeats", "3", "--temperature", "0.6", "--template-kwargs", '{"enable_thinking": true}']
        assert evaluate(server, files, *arguments, task=AIME) == 0
    records = ResultFile(files[1]).records
    assert sorted(r.key for r in records) == [("I-1", 0), ("I-1", 1), ("I-1", 2)]
    assert all(r.correct and r.answer == "42" for r in records)
    assert server.requests[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert server.requests[0]["temperature"] == 0.6 and len(server.requests[0]["messages"]) == 1


def test_sglang_takes_these_requests_and_tells_these_fields(files):
    pytest.importorskip("sglang")
    from sglang.srt.entrypoints.openai import protocol

    with FakeServer(right) as server:
        evaluate(server, files, "--limit", "1", "--template-kwargs", '{"enable_thinking": false}')
    request = protocol.ChatCompletionRequest(**server.requests[0])
    assert request.return_meta_info and not request.stream and request.chat_template_kwargs["enable_thinking"] is False
    assert "meta_info" in protocol.ChatCompletionResponseChoice.model_fields
    assert "reasoning_content" in protocol.ChatMessage.model_fields


def test_a_server_that_is_not_sglang(files, capsys):
    with FakeServer(right, sglang=False) as server:
        assert evaluate(server, files, "--limit", "2") == 0
    assert "return_meta_info" not in server.requests[0]
    assert ResultFile(files[1]).records[0].verify_steps is None
    assert "not told by the server" in capsys.readouterr().out


def test_resume_asks_only_what_is_missing(files):
    with FakeServer(right) as server:
        evaluate(server, files, "--limit", "5")
        whole = files[1].read_bytes()
        files[1].write_bytes(whole[:-40])  # killed while it wrote the fifth answer
        assert evaluate(server, files) == 0
    assert len(server.requests) == 5 + 1 + 7
    records = ResultFile(files[1]).records
    assert sorted(int(r.id) for r in records) == list(range(12))
    for line in files[1].read_text().splitlines():
        json.loads(line)


def test_resume_adds_repeats(files):
    with FakeServer(right) as server:
        evaluate(server, files)
        evaluate(server, files, "--repeats", "2")
    assert len(server.requests) == 24


def test_resume_refuses_other_settings(files, capsys):
    with FakeServer(right) as server:
        evaluate(server, files, "--limit", "2")
        before = files[1].read_bytes()
        assert evaluate(server, files, "--temperature", "1") == 1
    assert "temperature: 0.0, now 1.0" in capsys.readouterr().err
    assert files[1].read_bytes() == before


def test_failed_requests_are_asked_again_next_time(files, capsys):
    broken = {2, 7}

    def reply(prompt):
        if operand(prompt) in broken:
            raise LookupError("too long")
        return right(prompt)

    with FakeServer(reply) as server:
        assert evaluate(server, files) == 1
        assert "2 questions got no answer" in capsys.readouterr().err
        broken.clear()
        assert evaluate(server, files) == 0
    assert len(ResultFile(files[1]).records) == 12


def test_no_server(files, capsys):
    with FakeServer(right) as server:
        pass
    assert evaluate(server, files) == 1
    assert "error" in capsys.readouterr().err and not files[1].exists()


@pytest.mark.parametrize("line", ['{"question": "a?"}', '{"answer": "#### 1"}', '{"question": "a?", "answer": "none"}'])
def test_bad_data_is_named(files, line):
    files[0].write_text(line + "\n")
    with pytest.raises(SystemExit, match="question 0"):
        run.main(GSM8K, "test", ["--data", str(files[0]), "--out", str(files[1])])


def test_questions_from_the_hub(files, monkeypatch):
    def load_dataset(path, name, split):
        assert (path, name, split) == ("openai/gsm8k", "main", "test")
        return QUESTIONS

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    with FakeServer(right) as server:
        assert run.main(GSM8K, "test", ["--url", server.url, "--out", str(files[1])]) == 0
    assert all(record.correct for record in ResultFile(files[1]).records)


def test_without_datasets_or_the_hub_a_file_is_asked_for(files, monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route")

    for module in (None, types.SimpleNamespace(load_dataset=unreachable)):
        monkeypatch.setitem(sys.modules, "datasets", module)
        with pytest.raises(SystemExit, match="--data"):
            run.main(AIME, "test", ["--out", str(files[1])])


def test_compare(files, capsys):
    data, out = files
    a, b = out.with_name("off.jsonl"), out.with_name("on.jsonl")

    def worse(prompt):
        n = operand(prompt)
        if n == 6:
            return {"content": "again and " * 60, "tokens": 200, "steps": 50}
        return right(prompt) if n % 4 else "#### 1000"

    with FakeServer(right) as server:
        evaluate(server, (data, a))
    with FakeServer(worse) as server:
        evaluate(server, (data, b), "--limit", "10")
    capsys.readouterr()
    assert compare.main([str(a), str(b)]) == 0
    text = capsys.readouterr().out
    assert "10 answers each" in text and "1.0000" in text and "0.6000" in text
    assert "right only in A 4, only in B 0; exact McNemar: p = 0.125" in " ".join(text.split())
    assert "Loops raise the acceptance length" in text
    assert (out.parent / "compare-off-on.png").read_bytes().startswith(b"\x89PNG")


def test_compare_refuses_other_tasks_and_nothing_in_common(files, capsys):
    out = files[1]
    empty, aime = out.with_name("empty.jsonl"), out.with_name("aime.jsonl")
    with FakeServer(right) as server:
        evaluate(server, files, "--limit", "1")
    empty.write_text(out.read_text().splitlines()[0] + "\n")
    aime.write_text(out.read_text().replace('"task": "gsm8k"', '"task": "aime"'))
    capsys.readouterr()
    assert compare.main([str(out), str(aime)]) == 1
    assert "gsm8k and aime" in capsys.readouterr().err
    assert compare.main([str(out), str(empty)]) == 1
    assert compare.main([str(out), str(out.with_name("no-such-file.jsonl"))]) == 1
