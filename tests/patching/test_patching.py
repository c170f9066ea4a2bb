from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_replayssm import cli
from sglang_replayssm.patching import seam as patched_seams
from sglang_replayssm.patching import tree as tree_module
from sglang_replayssm.patching.tree import PatchError, Tree, TreeState, find_series
from sglang_replayssm.plugin import activation, seams
from sglang_replayssm.plugin.seams import Status

GDN = "srt/layers/attention/linear/gdn_backend.py"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_apply_and_reverse_restore_every_byte(directory, capsys):
    before = contents(directory)
    assert cli.main(["patch", "check", str(directory)]) == 0
    assert contents(directory) == before
    assert cli.main(["patch", "apply", str(directory)]) == 0
    patched = contents(directory)
    assert len(patched) == len(before) + 1
    assert cli.main(["patch", "apply", str(directory)]) == 0  # once more
    assert contents(directory) == patched
    assert "already patched" in capsys.readouterr().out
    assert cli.main(["patch", "status", str(directory)]) == 0
    assert re.search(r": patched, (\d+) of \1 hunks applied", capsys.readouterr().out)
    assert cli.main(["patch", "reverse", str(directory)]) == 0
    assert contents(directory) == before
    assert cli.main(["patch", "reverse", str(directory)]) == 0
    assert cli.main(["patch", "status", str(directory)]) == 0
    assert ": unpatched, 0 of" in capsys.readouterr().out


def test_every_hooked_seam_is_patched_and_no_other(tree):
    tree.apply()
    for seam in seams.SEAMS:
        found = seams.status_in(seams.read_module(tree.package, seam.module), seam)
        assert found is (Status.PATCHED if seam.hook else Status.OK), seam.target


def test_a_patched_seam_must_name_its_own_hook(tree):
    tree.apply()
    edit(tree.package / GDN, "verify:forward_decode", "verify:forward_extend")
    seam = next(seam for seam in seams.RING if seam.name == "GDNAttnBackend.forward_decode")
    assert seams.status_in(seams.read_module(tree.package, seam.module), seam) is Status.DIFFERS


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_agrees(tree):
    """The series is an ordinary one: `git apply` makes the same tree of it."""
    checkout = tree.package.parents[1]
    other = checkout.with_name("other")
    shutil.copytree(checkout, other)
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(other.parent)}
    subprocess.run(["git", "apply", *map(str, sorted(find_series().glob("*.patch")))], cwd=other, env=env, check=True)
    tree.apply()
    assert contents(other) == contents(checkout)


def refused(directory: Path, action: str, capsys) -> str:
    before = contents(directory)
    assert cli.main(["patch", action, str(directory)]) == 1
    assert contents(directory) == before, "a refusal changes nothing"
    return capsys.readouterr().err


@pytest.mark.parametrize("action", ["apply", "check"])
def test_a_local_change_at_a_hunk_is_refused_and_named(tree, capsys, action):
    edit(tree.package / GDN, "import is_cpu, is_cuda", "import  is_cpu, is_cuda")
    message = refused(tree.package, action, capsys)
    assert f"0005-verify.patch: {GDN}:18 is conflict" in message


def test_a_local_change_inside_a_seam_is_refused(tree, capsys):
    edit(tree.package / "srt/model_executor/model_runner.py", "No-op unless this is an extend", "No-op unless extend")
    message = refused(tree.package, "apply", capsys)
    assert "ModelRunner._maybe_execute_deferred_mamba_cow_and_clear differs" in message


def test_another_version_is_refused(tree, capsys):
    (tree.package / "_version.py").write_text("__version__ = version = '0.5.16'\n")
    message = refused(tree.package, "apply", capsys)
    assert "SGLang 0.5.16" in message and seams.PINNED_SGLANG in message


def test_a_half_patched_tree_is_neither(tree, capsys):
    original = (tree.package / GDN).read_bytes()
    tree.apply()
    (tree.package / GDN).write_bytes(original)
    assert tree.state() is TreeState.DIFFERS
    assert cli.main(["patch", "status", str(tree.package)]) == 1
    assert GDN in refused(tree.package, "reverse", capsys)
    refused(tree.package, "apply", capsys)


def test_local_changes_elsewhere_are_kept(tree):
    path = tree.package / GDN
    path.write_text("# mine\n\n" + path.read_text())
    before = contents(tree.package)
    assert tree.apply() and path.read_text().startswith("# mine\n")
    assert tree.reverse() and contents(tree.package) == before


def test_a_folder_without_sglang_is_refused(tmp_path, capsys):
    assert cli.main(["patch", "apply", str(tmp_path)]) == 1
    assert "holds no SGLang" in capsys.readouterr().err


@pytest.mark.parametrize("action", ["apply", "reverse"])
def test_a_write_that_fails_leaves_everything(tree, monkeypatch, action):
    if action == "reverse":
        tree.apply()
    before, replace, calls = contents(tree.package), os.replace, []

    def fails_once(source, target):
        calls.append(target)
        if len(calls) == 4:
            raise OSError("disk full")
        replace(source, target)

    monkeypatch.setattr(tree_module.os, "replace", fails_once)
    with pytest.raises(OSError, match="disk full"):
        getattr(tree, action)()
    assert contents(tree.package) == before


def test_shared_files_are_replaced_not_written(tree):
    """Installers link files to a cache that other environments share."""
    cached = tree.package / "cached.py"
    os.link(tree.package / GDN, cached)
    before = cached.read_bytes()
    tree.apply()
    assert cached.read_bytes() == before != (tree.package / GDN).read_bytes()


def test_series_with_a_bad_path_is_refused(tree, tmp_path):
    (tmp_path / "0001.patch").write_text("--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(ValueError, match=re.escape("0001.patch")):
        Tree.open(tree.package, tmp_path)
    with pytest.raises(PatchError, match="empty"):
        Tree.open(tree.package, tree.package)


def test_the_decorator_leaves_a_function_alone_until_switched_on(monkeypatch):
    monkeypatch.setattr(patched_seams, "_live", {})
    seam = seams.WITH_FLAG[0]
    function = patched_seams.replayssm_seam(seam.hook)(lambda value: value)
    assert function(1) == 1
    monkeypatch.setattr("sglang_replayssm.plugin.report.internal_state", lambda original, value: original(value) + 1)
    patched_seams.switch_on([seam])
    assert function(1) == 2


def test_the_decorator_calls_the_hooks_of_the_start_from_the_first(monkeypatch):
    monkeypatch.setattr(patched_seams, "_live", {})
    monkeypatch.setattr(activation, "check_server_args", lambda original, args: ["hooked", original(args)])
    function = patched_seams.replayssm_seam(seams.ALWAYS[0].hook)(lambda args: args)
    assert function("x") == ["hooked", "x"]


def test_the_whole_release_as_a_checkout(tmp_path, capsys):
    """Tag `v0.5.15.post1` as git lays it out: every file of the release in `python/sglang`, and no version file."""
    ignored = shutil.ignore_patterns("__pycache__", "_version.py")
    shutil.copytree(seams.sglang_root(), tmp_path / "python" / "sglang", ignore=ignored)
    before = contents(tmp_path)
    assert cli.main(["patch", "check", str(tmp_path)]) == 0, capsys.readouterr().err
    assert cli.main(["patch", "apply", str(tmp_path)]) == 0
    changed = {path for path, content in contents(tmp_path).items() if content != before.get(path)}
    assert changed == {f"python/sglang/{diff.path}" for diff in Tree.open(tmp_path).diffs}
    assert cli.main(["patch", "reverse", str(tmp_path)]) == 0
    assert contents(tmp_path) == before
