"""`sglang-replayssm`: what a user runs beside the server."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from pathlib import Path

from sglang_replayssm import environment, plan
from sglang_replayssm.patching.diff import State
from sglang_replayssm.patching.tree import PatchError, Tree, TreeState
from sglang_replayssm.plugin import flags, seams


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="sglang-replayssm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser(
        "check", help="whether this environment can run the ring; exit status 1 on a problem"
    )
    checking.add_argument("--report", action="store_true", help="print what a bug report needs instead; no secrets")
    checking.add_argument("--url", help="with --report: a running server, whose flags and ring are included")
    patch = commands.add_parser("patch", help="the patch series for a source tree of SGLang")
    actions = patch.add_subparsers(dest="action", required=True)
    for action, summary in _PATCH_ACTIONS.items():
        sub = actions.add_parser(action, help=summary, description=summary)
        sub.add_argument("directory", metavar="DIR", type=Path, help="git checkout or installed `sglang` folder")
        sub.add_argument("--series", metavar="DIR", type=Path, help="the series (default: that of this package)")
    planning = commands.add_parser(
        "plan",
        help="the memory of a server, stock and with the ring, told without a GPU",
        description=plan.DESCRIPTION,
        allow_abbrev=False,  # what looks like an abbreviation here may be an option of the server
    )
    plan.add_options(planning)
    arguments, server_options = parser.parse_known_args(argv)
    if arguments.command == "plan":
        return plan.run(arguments, server_options)
    if server_options:
        parser.error(f"unrecognized arguments: {' '.join(server_options)}")
    if arguments.command == "patch":
        return patch_tree(arguments.action, arguments.directory, arguments.series)
    if arguments.report:
        print(environment.report(arguments.url))
        return 0
    return check()


_PATCH_ACTIONS = {
    "apply": "apply the whole series or nothing; fine if it is applied already",
    "check": "say what apply would do and change nothing; exit status 1 if it would refuse",
    "reverse": "take the whole series back, byte for byte, or nothing",
    "status": "say whether the tree is patched; exit status 1 if it is neither patched nor clean",
}


def patch_tree(action: str, directory: Path, series: Path | None = None) -> int:
    """Run one of the `patch` commands; 1 if it is refused, with every reason."""
    try:
        tree = Tree.open(directory, series)
        if action == "apply":
            changed = tree.apply()
            print(f"{tree.package}: {'patched' if changed else 'already patched, nothing to do'}")
        elif action == "reverse":
            changed = tree.reverse()
            print(f"{tree.package}: {'reversed' if changed else 'not patched, nothing to do'}")
        elif action == "check":
            return _check_tree(tree)
        else:
            return _tree_status(tree)
    except (PatchError, OSError, ValueError) as error:
        print(f"refused, nothing was changed:\n{error}", file=sys.stderr)
        return 1
    return 0


def _check_tree(tree: Tree) -> int:
    if tree.state() is TreeState.PATCHED:
        print(f"{tree.package}: already patched")
        return 0
    problems = tree.problems()
    if problems:
        raise PatchError("\n".join(problems))
    print(f"{tree.package}: {len(tree.hunks())} hunks would apply")
    return 0


def _tree_status(tree: Tree) -> int:
    hunks, state = tree.hunks(), tree.state()
    applied = sum(found is State.APPLIED for _, found in hunks)
    print(f"{tree.package}: {state.value}, {applied} of {len(hunks)} hunks applied")
    for hunk, found in hunks:
        if found is State.CONFLICT:
            print(f"  {hunk.title} is {found.value}")
    return int(state is TreeState.DIFFERS)


def check() -> int:
    """Print versions, GPU, flags, entry point and every seam; 1 if anything keeps the ring from working."""
    problems = []
    print("versions")
    for package in ("sglang-replayssm", "sglang", "torch", "triton"):
        version = _version(package)
        print(f"  {package:17} {version or 'not installed'}")
        if version is None:
            problems.append(f"{package} is not installed")
    print(f"  {'GPU':17} {_gpu()}")

    print("\nplugin")
    entry_points = importlib.metadata.entry_points(group="sglang.srt.plugins")
    ours = [point for point in entry_points if point.value == "sglang_replayssm.plugin:register"]
    print(f"  {'entry point':17} {ours[0].name if ours else 'not found'}")
    print(f"  {'in use':17} {'no: this SGLang is patched' if seams.tree_is_patched() else 'yes'}")
    if not ours and not seams.tree_is_patched():
        problems.append("SGLang cannot find the plugin: install this package with pip instead of putting it on a path")

    print("\nflags")
    for flag in flags.FLAGS:
        print(f"  {flag.option}  (default {flag.default})\n      {flag.help}")

    print(f"\nseams (SGLang {seams.PINNED_SGLANG})")
    for seam in seams.SEAMS:
        found = seams.status(seam)
        print(f"  {found.value:8} {seam.target}\n           {seam.purpose}")
        if found is not seams.expected_status(seam):
            problems.append(f"seam {seam.target} {found.value}")

    print()
    if problems:
        print("\n".join(f"problem: {problem}" for problem in problems))
        print(f"fix: pip install sglang=={seams.PINNED_SGLANG} sglang-replayssm")
        return 1
    print("ok: the ring can be used here" + ("" if _gpu() != "none" else " (on a machine with an NVIDIA GPU)"))
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "none"
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"


if __name__ == "__main__":
    sys.exit(main())
