"""configs/*.yaml through SGLang's own parser, and the script that launches them. Nothing is looked up or started."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from unittest import mock

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before SGLang is imported

pytest.importorskip("sglang", reason="the configurations are SGLang's")

from sglang_replayssm.plugin import flags, support
from sglang_replayssm.tiny import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
LAUNCH = ROOT / "scripts" / "launch.sh"

each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)


@pytest.fixture(scope="module", autouse=True)
def server_flags():
    flags.add_to_server_args()


def parse(config: Path, tmp_path: Path, *extra: str):
    """ServerArgs of a configuration, its model replaced by a small one of the same family."""
    from sglang.srt.server_args import prepare_server_args

    architecture = "qwen3_5" if "qwen3.5" in config.stem else "qwen3_next"
    model = write_tiny_model(tmp_path / "model", architecture, weights=False)
    # What SGLang asks a GPU: which one, whether it is NVIDIA's (prefix caching with speculation), how large.
    module = "sglang.srt.server_args"
    capacity = mock.patch(f"{module}.get_device_memory_capacity", lambda device: 141 * 1024)  # MiB
    with mock.patch(f"{module}.is_cuda", lambda: True), capacity:
        return prepare_server_args(["--config", str(config), "--model-path", str(model), "--device", "cuda", *extra])


@each_config
def test_parses_into_a_server_that_uses_the_ring(config, tmp_path):
    args = parse(config, tmp_path)
    assert flags.enabled(args)
    assert (args.gdn_replayssm_cache_len, args.gdn_replayssm_fold) == (16, "fp32")
    assert args.speculative_num_draft_tokens == args.speculative_num_steps + 1 == 4
    assert args.speculative_eagle_topk == 1
    assert args.enable_mamba_extra_buffer() and not args.disable_overlap_schedule, "prefix caching as SGLang has it"
    flags.raise_on_contradiction(args)
    assert support.why_not(args) == []
    tensor_parallel = int(config.stem.rpartition("-tp")[2]) if "-tp" in config.stem else 1
    assert args.tp_size == tensor_parallel


@each_config
def test_says_what_it_was_measured_with(config):
    lines = config.read_text().splitlines()
    header = " ".join(line for line in lines if line.startswith("#"))
    assert lines[0].startswith("#") and "measured" in header.lower()


@each_config
def test_is_listed_in_the_readme(config):
    assert f"`{config.name}`" in (ROOT / "configs" / "README.md").read_text()


def test_further_arguments_win(tmp_path):
    args = parse(
        ROOT / "configs" / "qwen3.5-35b-a3b-tp4.yaml", tmp_path, "--tp", "2", "--gdn-replayssm-cache-len", "24"
    )
    assert (args.tp_size, args.gdn_replayssm_cache_len) == (2, 24)


@pytest.fixture
def launch(tmp_path):
    """Run launch.sh from a copy of the tree's two folders; returns its result, the server replaced by `echo`."""
    for folder, files in (("scripts", [LAUNCH]), ("configs", CONFIGS)):
        (tmp_path / folder).mkdir()
        for file in files:
            (tmp_path / folder / file.name).write_text(file.read_text())
    script = tmp_path / "scripts" / "launch.sh"
    script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        environment = os.environ | {"PYTHON": "echo"}
        return subprocess.run([script, *arguments], env=environment, cwd="/", capture_output=True, text=True)

    return run


def test_launch_by_name(launch, tmp_path):
    result = launch("tiny", "--port", "30001")
    expected = f"-m sglang.launch_server --config {tmp_path}/configs/tiny.yaml --port 30001"
    assert (result.returncode, result.stdout.strip()) == (0, expected)


def test_launch_by_path(launch, tmp_path):
    assert f"--config {CONFIGS[0]}" in launch(str(CONFIGS[0])).stdout


def test_stock_leaves_only_the_ring_out(launch, tmp_path):
    path = Path(launch("--stock", "tiny").stdout.split("--config ")[1].strip())
    ours = [line for line in (ROOT / "configs/tiny.yaml").read_text().splitlines() if "gdn-replayssm" not in line]
    assert path.read_text().splitlines() == ours
    assert not flags.enabled(parse(path, tmp_path))


@pytest.mark.parametrize("arguments", [(), ("--stock",), ("--help",), ("no-such-model",)])
def test_launch_says_what_it_wants(launch, arguments):
    result = launch(*arguments)
    assert result.returncode == 2 and result.stderr
