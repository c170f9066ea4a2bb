"""Whether a documented command line would be understood: parsed by what it names, and never run.

Each kind of command is checked by the parser that a user would meet. A kind that is not known here is an error, so that
none goes unchecked; `GENERIC` is the short list of shell lines that are taken as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from doc_pages import ROOT, Block

SCRIPTS = ROOT / "scripts"
GENERIC = ("cd", "git apply", "git clone")
PYTHONS = ("python", "python3", ".venv/bin/python")
# Scripts without a parser: whether they take words.
WITHOUT_PARSER = {"compile_offline.py": True, "make_patches.py": False, "draw_ring.py": False}
# First words by which prose and indented blocks show that they hold a command.
FIRST_WORDS = (*PYTHONS, "make", "pip", "git", "curl", "sglang", "sglang-replayssm", "scripts/launch.sh")
# Names of two words, which stand in the text without arguments.
PROGRAMS = ("sglang serve",)


class Misunderstood(Exception):
    """The command is wrong; the message says how."""


def command_lines(block: Block) -> Iterator[tuple[int, str]]:
    """Number and text of each command of a shell block, continuation lines joined as a shell does."""
    pending, start = "", 0
    for number, line in enumerate(block.text.splitlines(), block.line):
        start = start if pending else number
        if line.endswith("\\"):
            pending += line[:-1]
            continue
        if shlex.split(pending + line, comments=True):
            yield start, pending + line
        pending = ""
    if pending:
        raise Misunderstood(f"{pending!r} goes on beyond its block")


def looks_like_command(text: str) -> bool:
    """Whether text outside a shell block is a command: by its first word that is no assignment."""
    if text in PROGRAMS:
        return False
    words = [word for word in text.split() if not re.match(r"\w+=", word)]
    return len(words) > 1 and words[0] in FIRST_WORDS


def check(line: str, tmp: Path) -> None:
    """Check one line.

    Args:
        tmp: a scratch folder.

    Raises:
        Misunderstood: what it names does not exist, or does not take these arguments.
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    words = iter([*lexer, "&&"])
    for word in words:
        if word == ">":  # the output goes to a file
            next(words)
        elif word in ("&&", ";"):
            _check_one(command, tmp)
            command = []
        elif word and set(word) <= set("();<>|&"):
            raise Misunderstood(f"{word!r} is not something that this test can check")
        else:
            command.append(word)


def _check_one(words: list[str], tmp: Path) -> None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if not words:
        raise Misunderstood("there is no command")
    name, arguments = words[0], words[1:]
    for generic in GENERIC:
        if words[: len(generic.split())] == generic.split():
            return
    if name in PYTHONS:
        _python(arguments, tmp)
    elif name in ("pip", "make", "curl"):
        {"pip": _pip, "make": _make, "curl": _curl}[name](arguments)
    elif name == "sglang" and arguments[:1] == ["serve"]:
        _server(arguments[1:], tmp)
    elif name == "sglang-replayssm":
        _own_tool(arguments, tmp)
    elif name == "scripts/launch.sh":
        _launch(arguments, tmp)
    else:
        raise Misunderstood(f"{name!r} is no kind of command that this test knows: teach it, or leave it out")


def _python(arguments: list[str], tmp: Path) -> None:
    first, rest = (arguments or [""])[0], arguments[1:]
    if first == "-c" and len(rest) == 1:
        _compiles(rest[0])
    elif first == "-m" and rest[:1] == ["pytest"]:
        _pytest(rest[1:])
    elif first == "-m" and rest[:1] == ["pip"]:
        _pip(rest[1:])
    elif first == "-m" and rest[:1] == ["sglang.launch_server"]:
        _server(rest[1:], tmp)
    elif first == "-m" and rest[:1] == ["sglang_replayssm.demo_task"]:
        with mock.patch.object(sys, "argv", rest):
            _parsed(lambda: runpy.run_module(rest[0], run_name="__main__"))
    elif first.startswith("scripts/") and first.endswith(".py"):
        _script(ROOT / first, rest)
    else:
        raise Misunderstood(f"python {first!r} is nothing that this test knows")


def _compiles(code: str) -> None:
    try:
        compile(code, "<documentation>", "exec")
    except SyntaxError as error:
        raise Misunderstood(f"not Python: {error}") from error


def _pip(arguments: list[str]) -> None:
    from sglang_replayssm.plugin.seams import PINNED_SGLANG

    if arguments[:1] != ["install"]:
        raise Misunderstood("pip is for installing")
    for word in arguments:
        if word.startswith("sglang==") and word != f"sglang=={PINNED_SGLANG}":
            raise Misunderstood(f"{word} is not the supported release {PINNED_SGLANG}")


def _make(targets: list[str]) -> None:
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True)
    if done.returncode or any(target.startswith("-") for target in targets):
        raise Misunderstood(done.stderr or "make takes targets only")


def _curl(arguments: list[str]) -> None:
    from sglang_replayssm.plugin.seams import sglang_root

    source = (sglang_root() / "srt" / "entrypoints" / "http_server.py").read_text(encoding="utf-8")
    for word in arguments:
        path = re.match(r"https?://[^/]+(/[\w/]*)", word)
        # SGLang mounts /metrics, which is Prometheus' own application.
        if not (path and (f'("{path[1]}"' in source or path[1] == "/metrics")) and word != "-s":
            raise Misunderstood(f"curl {word}: SGLang's server has no such path")


def _pytest(arguments: list[str]) -> None:
    parser = _Parser("pytest", allow_abbrev=False)
    parser.add_argument("-m", dest="markers", default="")
    parser.add_argument("-k", dest="names", default="")
    parser.add_argument("-q", action="store_true")
    parser.add_argument("paths", nargs="*")
    options = parser.parse_args(arguments)
    for path in options.paths:
        if not (ROOT / path.partition("::")[0]).exists():
            raise Misunderstood(f"{path} does not exist")
    configured = re.findall(r'^    "(\w+):', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    for marker in set(re.findall(r"\w+", options.markers)) - {"not", "and", "or"}:
        if marker not in configured:
            raise Misunderstood(f"no marker {marker!r} in pyproject.toml")
    texts = "".join((ROOT / path.partition("::")[0]).read_text() for path in options.paths if path.endswith(".py"))
    for name in [*re.findall(r"\w+", options.names), *(n for p in options.paths for n in p.split("::")[1:])]:
        if name not in texts:
            raise Misunderstood(f"no test of {' '.join(options.paths)} is called {name!r}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise Misunderstood(f"{self.prog}: {message}")


def _script(path: Path, arguments: list[str]) -> None:
    """Through the script's own parser: it runs up to there and no further."""
    if not path.is_file():
        raise Misunderstood(f"{path.relative_to(ROOT)} does not exist")
    if path.name in WITHOUT_PARSER:
        if "argparse" in path.read_text(encoding="utf-8"):
            raise Misunderstood(f"{path.name} has a parser now: take it out of WITHOUT_PARSER")
        if any(word.startswith("-") for word in arguments) or (arguments and not WITHOUT_PARSER[path.name]):
            raise Misunderstood(f"{path.name} does not take {' '.join(arguments)}")
        return
    modules = [str(SCRIPTS), *sys.path]
    with (
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", modules),
        mock.patch.dict(os.environ),
    ):
        _parsed(lambda: runpy.run_path(str(path), run_name="__main__"))


def _own_tool(arguments: list[str], tmp: Path) -> None:
    from sglang_replayssm import cli

    options, server_options = _parsed(lambda: cli.main(arguments))
    if server_options:
        if options.command != "plan":
            raise Misunderstood(f"sglang-replayssm {options.command} does not take {' '.join(server_options)}")
        _server(["--model-path", str(options.model), *server_options], tmp)


def _parsed(main: Callable[[], object]) -> tuple[argparse.Namespace, list[str]]:
    """What the first parser that `main` runs makes of its command line; nothing behind that is run.

    Raises:
        Misunderstood: with the parser's own words.
    """

    class Parsed(Exception):
        pass

    stock, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse_known_args(self, *args, **kwargs):
        nonlocal depth
        depth += 1  # subcommands have parsers of their own
        try:
            result = stock(self, *args, **kwargs)
        finally:
            depth -= 1
        if depth:
            return result
        raise Parsed(*result)

    def parse_args(self, *args, **kwargs):
        try:
            parse_known_args(self, *args, **kwargs)
        except Parsed as parsed:
            if parsed.args[1]:
                self.error(f"unrecognized arguments: {' '.join(parsed.args[1])}")
            raise

    output = io.StringIO()
    with (
        mock.patch.multiple(argparse.ArgumentParser, parse_known_args=parse_known_args, parse_args=parse_args),
        contextlib.redirect_stderr(output),
        contextlib.redirect_stdout(output),
    ):
        try:
            main()
        except Parsed as parsed:
            return parsed.args
        except SystemExit as stop:
            if stop.code in (0, None):  # --help
                return argparse.Namespace(command=None), []
            raise Misunderstood(output.getvalue() or str(stop.code)) from None
    raise Misunderstood("it parsed nothing")


def _launch(arguments: list[str], tmp: Path) -> None:
    """launch.sh from a copy, since it may write; then the server's command line that it would run."""
    copy = tmp / "launch"
    if not copy.exists():
        for folder in ("scripts", "configs"):
            (copy / folder).mkdir(parents=True)
        shutil.copy(SCRIPTS / "launch.sh", copy / "scripts")
        for config in (ROOT / "configs").glob("*.yaml"):
            shutil.copy(config, copy / "configs")
    done = subprocess.run(
        ["bash", str(copy / "scripts" / "launch.sh"), *arguments],
        env=os.environ | {"PYTHON": "echo"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise Misunderstood(done.stderr)
    _python(shlex.split(done.stdout), tmp)


def _server(arguments: list[str], tmp: Path) -> None:
    """Through SGLang's parser, the model replaced by a small one; with the ring's flag the ring must be used."""
    from sglang.srt.server_args import prepare_server_args

    from sglang_replayssm.plugin import flags, support

    if arguments == ["--help"]:
        return
    flags.add_to_server_args()
    if not {"--model", "--model-path", "--config"} & set(arguments):
        raise Misunderstood("it names no model")
    architecture = "qwen3_5" if "qwen3.5" in " ".join(arguments).lower() else "qwen3_next"
    output, module = io.StringIO(), "sglang.srt.server_args"
    with (
        contextlib.redirect_stderr(output),
        contextlib.redirect_stdout(output),
        mock.patch(f"{module}.is_cuda", lambda: True),  # as on the machine that the command is for
        mock.patch(f"{module}.get_device_memory_capacity", lambda device: 141 * 1024),  # MiB
    ):
        try:
            # The device is named because SGLang refuses to guess one where there is none.
            args = prepare_server_args([*arguments, "--model-path", _tiny_model(architecture, tmp), "--device", "cuda"])
            if flags.enabled(args):
                flags.raise_on_contradiction(args)
        except (SystemExit, ValueError, AssertionError) as error:
            raise Misunderstood(f"{output.getvalue()[-2000:]}\n{error}") from None
    reasons = support.why_not(args) if flags.enabled(args) else []
    if reasons:
        raise Misunderstood(f"the ring would not be used: {'; '.join(reasons)}")


@functools.cache
def _tiny_model(architecture: str, tmp: Path) -> str:
    from sglang_replayssm.tiny import write_tiny_model

    return str(write_tiny_model(tmp / architecture, architecture, weights=False))
