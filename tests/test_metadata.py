"""What the installed distribution says of itself, and that it agrees with the sources. No network, nothing built."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import sglang_replayssm

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "sglang-replayssm"


@pytest.fixture(scope="module")
def metadata():
    return importlib.metadata.metadata(DISTRIBUTION)


def test_version_is_the_same_everywhere(metadata):
    version = sglang_replayssm.__version__
    assert metadata["Version"] == version
    assert re.search(rf'^version = "{re.escape(version)}"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    latest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert latest and latest[1] == version


def test_supported_pythons(metadata):
    supported = SpecifierSet(metadata["Requires-Python"])
    assert [minor for minor in range(8, 15) if f"3.{minor}.5" in supported] == [10, 11, 12]
    assert f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}" in supported


def test_moves_no_pin_of_sglang(metadata):
    assert not metadata.get_all("Requires-Dist")


def test_sglang_finds_the_plugin_and_users_the_command():
    points = {(p.group, p.name): p.value for p in importlib.metadata.distribution(DISTRIBUTION).entry_points}
    assert points["sglang.srt.plugins", "replayssm"] == "sglang_replayssm.plugin:register"
    assert points["console_scripts", "sglang-replayssm"] == "sglang_replayssm.cli:main"


def test_ships_type_information():
    assert files("sglang_replayssm").joinpath("py.typed").is_file()


def test_the_command_line_needs_neither_torch_nor_sglang():
    """`check` is there to say what is missing."""
    code = "import sys; sys.modules.update(torch=None, triton=None, sglang=None); import sglang_replayssm.cli"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
