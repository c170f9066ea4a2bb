from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sglang_replayssm import cli
from sglang_replayssm.plugin import seams
from sglang_replayssm.plugin.seams import Status


@pytest.fixture(autouse=True)
def fresh_caches():
    yield
    seams.sglang_root.cache_clear()
    seams._source.cache_clear()


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.target)
def test_the_pin_has_every_seam(seam):
    assert seams.status(seam) is Status.OK


@pytest.mark.parametrize("seam", [s for s in seams.SEAMS if s.hook], ids=lambda seam: seam.target)
def test_every_hook_exists(seam):
    module, function = seam.hook.split(":")
    __import__(module)
    assert callable(getattr(sys.modules[module], function))


def test_fingerprint_sees_a_changed_line_and_ignores_its_place():
    source = "class A:\n    def f(self):\n        return 1\n"
    assert seams.fingerprint_of(source, "A.f") == seams.fingerprint_of("\n\n" + source, "A.f")
    assert seams.fingerprint_of(source, "A.f") != seams.fingerprint_of(source.replace("1", "2"), "A.f")
    assert seams.fingerprint_of(source, "A.g") is None


def test_fingerprint_includes_decorators():
    assert seams.fingerprint_of("@x\ndef f(): ...\n", "f") != seams.fingerprint_of("@y\ndef f(): ...\n", "f")


def _pretend_another_sglang(monkeypatch):
    monkeypatch.setattr(seams, "_source", lambda module: "def load_plugins(): ...\n")


def test_another_sglang_is_refused_as_a_whole_and_named(monkeypatch):
    _pretend_another_sglang(monkeypatch)
    with pytest.raises(RuntimeError) as error:
        seams.raise_on_mismatch()
    message = str(error.value)
    assert "MambaPool.__init__ (missing)" in message and "load_plugins (differs)" in message
    assert f"pip install sglang=={seams.PINNED_SGLANG}" in message


def test_check_reports_and_exits_with_one_on_a_problem(monkeypatch, capsys):
    assert cli.main(["check"]) == 0
    assert "ok: the ring can be used here" in capsys.readouterr().out
    _pretend_another_sglang(monkeypatch)
    assert cli.main(["check"]) == 1
    assert "problem: seam" in capsys.readouterr().out


PROBE = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
print(json.dumps({
    "hooks": sorted(HookRegistry._patched),
    "ours": sorted(m for m in sys.modules if m.startswith("sglang_replayssm")),
}))
"""


def test_without_the_flag_two_hooks_and_no_kernel():
    """Off is off: at load only the argument and scheduler-start seams are touched and no kernel is imported."""
    env = os.environ | {"SGLANG_PLUGINS": "replayssm", "CPUSIM": "0"}
    out = subprocess.run([sys.executable, "-c", PROBE], env=env, capture_output=True, text=True, check=True).stdout
    found = json.loads(out.splitlines()[-1])
    assert found["hooks"] == sorted(seam.target for seam in seams.ALWAYS)
    assert not [m for m in found["ours"] if "kernels" in m or m.endswith((".verify", ".memory", ".rows", ".pool"))]


def test_a_hook_that_did_not_apply_stops_the_start(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.server_args import ServerArgs

    from sglang_replayssm.plugin import activation

    monkeypatch.setattr(HookRegistry, "_patched", set())
    args = ServerArgs(model_path="dummy", enable_gdn_replayssm_spec=True)
    with pytest.raises(RuntimeError, match="configure_scheduler_process"):
        activation.check_server_args(lambda self: None, args)


RIVAL = """
from sglang.srt.plugins import hook_registry
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang_replayssm.plugin import activation, seams

target = seams.RING[-1]  # the commit, whose loss would go unnoticed
HookRegistry.register(target.target, lambda original, *args, **kwargs: original(*args, **kwargs), HookType.AROUND)
HookRegistry.apply_hooks()
try:
    activation._apply(seams.RING)
except RuntimeError as error:
    print(error)
"""


def test_another_plugin_on_a_target_stops_the_start():
    """SGLang applies the hooks of a target once, so ours would be dropped without a word, and tokens lost."""
    env = os.environ | {"SGLANG_PLUGINS": "replayssm", "CPUSIM": "0", "TRITON_INTERPRET": "1"}
    out = subprocess.run([sys.executable, "-c", RIVAL], env=env, capture_output=True, text=True, check=True).stdout
    assert "another plugin already hooks" in out and seams.RING[-1].target in out


def test_a_hook_is_seen_in_a_chain_of_wrappers(monkeypatch):
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    from sglang_replayssm.plugin import activation

    seam = seams.ALWAYS[1]
    ours, other = activation.configure_scheduler_process, lambda original: original()
    chain = _wrap_fn(_wrap_fn(lambda: None, ours, HookType.AROUND), other, HookType.AROUND)
    import sglang.srt.managers.scheduler as scheduler

    assert not activation._is_hooked(seam)
    monkeypatch.setattr(scheduler, "configure_scheduler_process", chain)
    assert activation._is_hooked(seam)


def test_ray_is_named_since_its_actors_load_no_plugins(monkeypatch, caplog):
    from sglang.srt.server_args import ServerArgs

    from sglang_replayssm.plugin import activation

    monkeypatch.setattr(activation, "_raise_on_missing_hooks", lambda wanted: None)
    args = ServerArgs(model_path="dummy", enable_gdn_replayssm_spec=True)
    args.use_ray = True
    with caplog.at_level("WARNING"):
        activation.check_server_args(lambda self: None, args)
    assert "--use-ray" in caplog.text


def test_without_the_flag_nothing_is_checked(monkeypatch):
    from sglang.srt.server_args import ServerArgs

    from sglang_replayssm.plugin import activation

    _pretend_another_sglang(monkeypatch)
    called = []
    activation.check_server_args(called.append, ServerArgs(model_path="dummy"))
    assert len(called) == 1
