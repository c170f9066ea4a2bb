"""`sglang-replayssm plan` as a command: what it prints, and what it says when it cannot."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sglang_replayssm import cli, plan
from sglang_replayssm.checkpoint import weight_bytes
from sglang_replayssm.tiny import write_tiny_model

pytest.importorskip("sglang", reason="plan runs SGLang's code")

# Embedding and head of the draft: 512 tokens of 64, bf16.
DRAFT_COPIES = 2 * 512 * 64 * 2
RING = ("--disable-radix-cache", "--max-running-requests", "24", "--mem-fraction-static", "0.8")


@pytest.fixture
def model(tmp_path):
    return write_tiny_model(tmp_path / "model", "qwen3_5")


def run(model, *options: str, gpu_memory: str = "2") -> int:
    return cli.main(["plan", "--model", str(model), "--gpu-memory", gpu_memory, *options])


def test_json_has_both_columns(model, capsys):
    assert run(model, *RING, "--json", "--request-tokens", "256+512") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["request_tokens"] == 768 and found["free_before_load_gib"] == 2 - plan.BEFORE_LOAD
    assert found["weights_gib"] == (weight_bytes(model) + DRAFT_COPIES) / plan.GIB
    stock, ring = found["stock"], found["ring"]
    assert stock["requests"] == ring["requests"] == 24
    assert stock["scratch"] > 2 * ring["scratch"] and ring["kv_tokens"] > stock["kv_tokens"]
    assert ring["best_max_running_requests"] > stock["best_max_running_requests"] > 24 == stock["concurrent"]
    assert found["problems"] == {"stock": [], "ring": []}


def test_the_table_says_the_same(model, capsys):
    run(model, *RING, "--json")
    ring = json.loads(capsys.readouterr().out)["ring"]
    assert run(model, *RING) == 0
    shown = capsys.readouterr().out
    line = next(line for line in shown.splitlines() if "KV cache, tokens" in line)
    assert line.split()[-1] == f"{ring['kv_tokens']:,}"
    assert "Not known without a GPU" in shown and "--speculative-draft-model-path" in shown


def test_options_of_the_server_reach_it(model, capsys):
    assert run(model, *RING, "--tp", "2", "--gdn-replayssm-fold", "exact", "--weights-gb", "0.25", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tp_size"] == 2 and found["weights_gib"] == 0.25
    assert run(model, *RING, "--tp", "2", "--weights-gb", "0.25", "--json") == 0
    fp32 = json.loads(capsys.readouterr().out)
    assert found["ring"]["ring"] != fp32["ring"]["ring"] and found["stock"] == fp32["stock"]


def test_weights_are_shared_by_the_gpus(model, capsys):
    assert run(model, *RING, "--tp", "2", "--free-gb", "1.25", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["weights_gib"] == (weight_bytes(model) + DRAFT_COPIES) / plan.GIB / 2
        and found["free_before_load_gib"] == 1.25
    )


def test_a_draft_model_of_its_own_is_weighed(model, tmp_path, capsys):
    draft = write_tiny_model(tmp_path / "draft", "qwen3_5", hidden_size=128)
    assert run(model, *RING, "--speculative-draft-model-path", str(draft), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["weights_gib"] == (weight_bytes(model) + weight_bytes(draft)) / plan.GIB


def test_without_the_ring_stock_is_still_planned(model, capsys):
    """With the reason that the server would give."""
    assert run(model, *RING, "--enable-two-batch-overlap") == 1
    shown = capsys.readouterr().out
    assert "No column for ring: --enable-two-batch-overlap is on" in shown
    assert next(line for line in shown.splitlines() if "scratch" in line).split()[-1] == "-"


def test_stock_may_not_fit_where_the_ring_does(model, capsys):
    """24 rows of state copies at 16 draft tokens do not fit in what the ring leaves half empty."""
    options = ("--speculative-num-draft-tokens", "16", "--free-gb", "0.13", "--weights-gb", "0.09")
    assert run(model, *RING, *options, "--max-running-requests", "32", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stock"] is None and found["problems"]["stock"] and found["ring"]["requests"] == 32


def test_without_a_folder(tmp_path, capsys):
    assert run(tmp_path / "nowhere") == 1
    assert "nowhere holds no config.json" in capsys.readouterr().err


def test_without_weights(tmp_path, capsys):
    assert run(write_tiny_model(tmp_path, weights=False)) == 1
    assert "--weights-gb" in capsys.readouterr().err


def test_too_little_memory(model, capsys):
    assert run(model, *RING, "--weights-gb", "0.99") == 1
    assert "Raise --mem-fraction-static" in capsys.readouterr().err


def test_a_contradiction(model, capsys):
    assert run(model, *RING, "--gdn-replayssm-cache-len", "2") == 1
    assert "--gdn-replayssm-cache-len=2 is smaller" in capsys.readouterr().err


def test_without_torch_and_sglang(model):
    argv = ["plan", "--model", str(model), "--gpu-memory", "2"]
    code = "import sys; sys.modules.update(torch=None, triton=None, sglang=None); from sglang_replayssm import cli"
    code += f"; sys.exit(cli.main({argv}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("no plan: ") and "pip install sglang==" in done.stderr


@pytest.mark.parametrize("options", [("--gpu-memory", "-3"), ("--gpu-memory", "2", "--request-tokens", "a")])
def test_bad_values(model, options, capsys):
    with pytest.raises(SystemExit):
        cli.main(["plan", "--model", str(model), *options])


@pytest.mark.parametrize("argv", [["check", "--tp", "4"], ["patch", "status", ".", "--json"]])
def test_other_commands_take_no_options_of_the_server(argv, capsys):
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert "unrecognized arguments" in capsys.readouterr().err
