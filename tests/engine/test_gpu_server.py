"""The real server on a GPU: greedy text with the ring on against off differs only at near ties."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang", reason="needs SGLang")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "compare_greedy.py"


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("architecture", "fold"), [("qwen3_next", "fp32"), ("qwen3_5", "fp32"), ("qwen3_next", "every-commit")]
)
def test_every_first_difference_is_a_near_tie(tmp_path, architecture, fold):
    """Under every-commit there must be none at all where stock equals itself."""
    command = [sys.executable, str(SCRIPT), "--architecture", architecture, "--fold", fold]
    command += ["--out", str(tmp_path), "--timeout", "420"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
