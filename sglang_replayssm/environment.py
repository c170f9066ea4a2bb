"""The report that a user sends with a bug: versions, seams, a server's flags and ring, environment; no secrets.

Standard library only, and it raises nothing: a broken environment is when it is needed most.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_replayssm.plugin import flags, seams

PACKAGES = ("sglang-replayssm", "sglang", "torch", "triton")
PREFIXES = ("SGLANG_", "TRITON_")
REDACTED = "<redacted>"

_SECRET_NAME = re.compile(r"token|key|secret|passw|credential|auth", re.IGNORECASE)
# In values: a password in a URL, tokens with a known beginning, a secret given as an option or an assignment.
_SECRETS = (
    (re.compile(r"(?<=://)[^/\s]+@"), f"{REDACTED}@"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|github_pat_|glpat-|xox[a-z]-)[\w-]{8,}|\bBearer\s+\S+"), REDACTED),
    (re.compile(r"(?i)([\w-]*(?:token|key|secret|passw|credential|auth)[\w-]*\W{0,3}[=:\s]\W{0,3})[^\s,;&'\"]+"), None),
)
# Of the server's arguments, those that decide whether and how the ring runs. Others may hold keys or prompts.
_ARGUMENTS = (
    "model_path",
    "dtype",
    "device",
    "tp_size",
    "dp_size",
    "pp_size",
    "attention_backend",
    "linear_attn_backend",
    "linear_attn_decode_backend",
    "linear_attn_prefill_backend",
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "disable_radix_cache",
    "disable_overlap_schedule",
    "disable_cuda_graph",
    "disaggregation_mode",
    "mamba_ssm_dtype",
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "max_mamba_cache_size",
    "max_running_requests",
    "mem_fraction_static",
)


def report(url: str | None = None) -> str:
    """Everything a maintainer asks for first.

    Args:
        url: of a running server whose flags and ring to include, for example "http://127.0.0.1:30000".
    """
    sections = {"versions": _versions(), "seams": _seams()}
    if url is not None:
        sections[f"server {_address(url)}"] = _server(url)
    sections["environment"] = environment_variables(os.environ)
    lines = []
    for title, entries in sections.items():
        lines += [title, *(f"  {name:32} {value}" for name, value in entries), ""]
    return "\n".join(lines)


def environment_variables(environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """SGLang's and Triton's variables, secrets taken out. A name that sounds like a secret hides its whole value."""
    for name in sorted(environment):
        if name.startswith(PREFIXES):
            yield name, REDACTED if _SECRET_NAME.search(name) else redact(environment[name])


def redact(text: str) -> str:
    """`text` without what looks like a secret."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement or (lambda match: match[1] + REDACTED), text)
    return text


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    yield "platform", platform.platform()
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    yield "CUDA of torch", _torch_cuda()
    yield from _gpus()


def _torch_cuda() -> str:
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        return f"torch cannot be imported: {type(error).__name__}: {redact(str(error))}"
    return torch.version.cuda or "none"


def _gpus() -> Iterator[tuple[str, str]]:
    """Driver and GPUs as the driver's own tool tells them, which needs no CUDA context."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        yield "NVIDIA driver", "none found"
        return
    gpus = [[field.strip() for field in line.split(",", 2)] for line in output.splitlines() if line.count(",") >= 2]
    yield "NVIDIA driver", gpus[0][0] if gpus else "no GPU"
    for index, (_, name, memory) in enumerate(gpus):
        yield f"GPU {index}", f"{name}, {memory}"


def _seams() -> Iterator[tuple[str, str]]:
    """How many seams are as in the pin, and by name those that are not."""
    found = {seam.target: seams.status(seam).value for seam in seams.SEAMS}
    for value in sorted(set(found.values())):
        yield value, f"{list(found.values()).count(value)} of {len(found)} (made for SGLang {seams.PINNED_SGLANG})"
    for target, value in found.items():
        if value != seams.Status.OK.value:
            yield f"  {value}", target


def _server(url: str) -> Iterator[tuple[str, str]]:
    try:
        info = _server_info(url)
    except (OSError, ValueError) as error:
        yield "no answer", redact(f"{type(error).__name__}: {error}")
        return
    yield "version", str(info.get("version"))
    for name in (*(flag.name for flag in flags.FLAGS), *_ARGUMENTS):
        if name in info:
            yield name, redact(str(info[name]))
    states = info.get("internal_states") or [{}]
    ring = states[0].get("gdn_replayssm")
    if not isinstance(ring, dict):
        yield "ring", "the server says nothing of it: it was started without the flag"
        return
    for name, value in ring.items():  # our own words, and "draft tokens is 20" is no secret
        yield f"ring {name}", "; ".join(map(str, value)) or "-" if isinstance(value, list) else str(value)


def _server_info(url: str) -> dict[str, Any]:
    """The server's account of itself.

    Raises:
        OSError: no answer, or none that is fine.
        ValueError: a bad URL, or an answer that is not a JSON object.
    """
    for path in ("/server_info", "/get_server_info"):  # the older name last
        try:
            with urllib.request.urlopen(url.rstrip("/") + path, timeout=30) as response:
                info = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                continue
            raise
        if not isinstance(info, dict):
            raise ValueError("the answer is not a JSON object")
        return info
    raise ValueError("it has no /server_info")


def _address(url: str) -> str:
    """The URL without user, password and query."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
