"""A whole patched SGLang: what it says of itself, that the plugin stays away, and that it generates the same tokens."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_replayssm.patching.tree import Tree
from sglang_replayssm.plugin import flags, seams

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))


@pytest.fixture(scope="module")
def patched_path(tmp_path_factory) -> Path:
    """A PYTHONPATH entry with the whole pin, patched."""
    directory = tmp_path_factory.mktemp("patched")
    shutil.copytree(seams.sglang_root(), directory / "sglang", ignore=shutil.ignore_patterns("__pycache__"))
    assert Tree.open(directory).apply()
    return directory


PROBE = """
import dataclasses, json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from sglang.srt.server_args import ServerArgs
fields = {f.name: f.default for f in dataclasses.fields(ServerArgs) if "gdn_replayssm" in f.name}
import argparse
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
actions = {a.dest: [a.default, a.help, a.choices] for a in parser._actions if "gdn_replayssm" in a.dest}
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
ServerArgs(model_path="dummy")
kernels = [m for m in sys.modules if m.startswith("sglang_replayssm.kernels")]
try:
    refusal = ServerArgs(model_path="dummy", enable_gdn_replayssm_spec=True, enable_linear_replayssm=True)
    refusal.check_server_args()
except ValueError as error:
    refusal = str(error)
from sglang_replayssm import cli
status = cli.main(["check"])
print(json.dumps([fields, actions, sorted(HookRegistry._hooks), kernels, str(refusal), status]))
"""


def test_flags_are_fields_and_the_plugin_stays_away(patched_path):
    env = os.environ | {"PYTHONPATH": str(patched_path), "SGLANG_PLUGINS": "replayssm", "CPUSIM": "0"}
    run = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *report, last = run.stdout.splitlines()
    fields, actions, hooks, kernels, refusal, status = json.loads(last)
    assert fields == {flag.name: flag.default for flag in flags.FLAGS}
    assert {name: help for name, (_, help, _) in actions.items()} == {flag.name: flag.help for flag in flags.FLAGS}
    assert actions[flags.FOLD.name][2] == list(flags.FOLD.choices)
    assert hooks == [] and run.stderr.count("so the plugin hooks nothing") == 1
    assert kernels == [], "without the flag no kernel is imported"
    assert "--enable-linear-replayssm" in refusal
    assert status == 0
    for seam in seams.SEAMS:
        assert f"  {'patched' if seam.hook else 'ok':8} {seam.target}" in report


ORPHAN = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang_replayssm":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, NotInstalled())
from sglang.srt.server_args import ServerArgs
from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
assert not hasattr(configure_scheduler_process, "__wrapped__")
assert not hasattr(Scheduler.get_internal_state, "__wrapped__")
ServerArgs(model_path="dummy")
try:
    ServerArgs(model_path="dummy", enable_gdn_replayssm_spec=True).check_server_args()
except ValueError as error:
    print("refused:", error)
"""


def test_without_the_package_it_runs_as_stock_and_refuses_the_flag(patched_path):
    env = os.environ | {"PYTHONPATH": str(patched_path), "SGLANG_PLUGINS": "none"}
    run = subprocess.run([sys.executable, "-c", ORPHAN], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "refused: --enable-gdn-replayssm-spec needs" in run.stdout


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_the_engine_generates_the_same_tokens_as_with_the_plugin(patched_path, tmp_path):
    pytest.importorskip("sglang_cpusim", reason="needs tests/cpusim installed (make setup)")
    from scenarios import CROWD, SCENARIOS, run_scenario

    plugin = replace(SCENARIOS["next-replay-overlap"], batches=(CROWD,))
    patched = replace(plugin, env={"PYTHONPATH": str(patched_path), "SGLANG_PLUGINS": "cpusim"})
    with ThreadPoolExecutor(2) as pool:
        plugin, patched = pool.map(run_scenario, (plugin, patched), (tmp_path / "plugin", tmp_path / "patched"))
    assert patched.tokens() == plugin.tokens()
    assert patched.histogram() == plugin.histogram()
    assert patched.replayssm == plugin.replayssm and patched.replayssm["active"]
    assert "sglang_replayssm:folds_total" in patched.metrics
    assert "sglang_replayssm" not in "".join(line for line in patched.log.splitlines() if "Applied" in line)
