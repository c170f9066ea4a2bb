"""The bug report: what it holds, and above all what it must not."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading

import pytest

from sglang_replayssm import __version__, environment
from sglang_replayssm.plugin import seams

SECRET = "do-not-leak-8f3a"
RING = {
    "active": False,
    "reasons": ["--enable-hierarchical-cache is on", "--speculative-num-draft-tokens is 20"],
    "folds": 7,
}
INFO = {
    "version": "0.5.15.post1",
    "enable_gdn_replayssm_spec": True,
    "gdn_replayssm_cache_len": 16,
    "speculative_algorithm": "EAGLE",
    "model_path": "Qwen/Qwen3.5-35B-A3B",
    "api_key": SECRET,
    "admin_api_key": SECRET,
    "served_model_name": f"token={SECRET}",
    "internal_states": [{"gdn_replayssm": RING, "api_key": SECRET}],
}


@pytest.fixture
def serve():
    """Start a server that answers paths from a dict; returns its URL."""
    servers = []

    def start(answers: dict[str, object]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path in answers else 404)
                self.end_headers()
                self.wfile.write(json.dumps(answers.get(self.path)).encode())

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)


def test_versions_and_seams():
    text = environment.report()
    assert __version__ in text and "torch" in text and "triton" in text
    assert f"{len(seams.SEAMS)} (made for SGLang {seams.PINNED_SGLANG})" in text
    assert "server" not in text.splitlines()


def test_seams_that_differ_are_named(monkeypatch):
    odd = seams.SEAMS[3]
    monkeypatch.setattr(seams, "status", lambda seam: seams.Status.DIFFERS if seam is odd else seams.Status.OK)
    text = environment.report()
    assert f"1 of {len(seams.SEAMS)}" in text and odd.target in text and seams.SEAMS[0].target not in text


def test_driver_and_gpus(monkeypatch):
    output = "580.1, NVIDIA H200, 143771 MiB\n580.1, NVIDIA H200, 143771 MiB\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, output))
    found = dict(environment._gpus())
    assert found["NVIDIA driver"] == "580.1" and found["GPU 1"] == "NVIDIA H200, 143771 MiB"


def test_without_a_gpu():
    assert dict(environment._gpus()) == {"NVIDIA driver": "none found"}


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_flags_and_fallback_reasons_of_a_server(serve, path):
    text = environment.report(serve({path: INFO}))
    for expected in ("enable_gdn_replayssm_spec", "EAGLE", "; ".join(RING["reasons"]), "ring folds"):
        assert expected in text
    assert SECRET not in text


def test_a_server_without_the_flag(serve):
    assert "started without the flag" in environment.report(serve({"/server_info": {"internal_states": [{}]}}))


@pytest.mark.parametrize("answers", [{}, {"/server_info": [1]}])
def test_a_server_that_answers_something_else(serve, answers):
    assert "no answer" in environment.report(serve(answers))


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", f"http://user:{SECRET}@127.0.0.1:9/x?key={SECRET}"])
def test_no_server_is_reported_and_leaks_nothing(url):
    text = environment.report(url)
    assert "no answer" in text and SECRET not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SGLANG_API_KEY", SECRET),
        ("SGLANG_HF_TOKEN", SECRET),
        ("TRITON_CLIENT_SECRET", SECRET),
        ("SGLANG_DB_PASSWORD", SECRET),
        ("SGLANG_db_Passwd", SECRET),
        ("SGLANG_EXTRA_ARGS", f"--tp 2 --api-key {SECRET}"),
        ("SGLANG_EXTRA_ARGS", f"--admin-api-key={SECRET} --tp 2"),
        ("SGLANG_JSON", f'{{"hf_token": "{SECRET}", "tp": 2}}'),
        ("SGLANG_REMOTE", f"https://user:{SECRET}@host/path"),
        ("SGLANG_REMOTE", f"https://{SECRET}@host/path"),
        ("SGLANG_REMOTE", f"https://user:p@{SECRET}@host/path"),
        ("SGLANG_URL", f"http://host/?a=1&access_token={SECRET}&b=2"),
        ("SGLANG_PLAIN", f"hf_{SECRET.replace('-', '')}"),
        ("SGLANG_PLAIN", f"sk-{SECRET}"),
        ("SGLANG_HEADER", f"Bearer {SECRET}"),
        ("SGLANG_HEADER", f"Authorization: Bearer {SECRET}"),
        ("AWS_SOMETHING", SECRET),
    ],
)
def test_no_secret_leaks(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    text = environment.report()
    assert SECRET not in text and SECRET.replace("-", "") not in text


def test_harmless_variables_are_shown(monkeypatch):
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/triton")
    shown = dict(environment.environment_variables({"SGLANG_SIMULATE_ACC_LEN": "3", "TRITON_CACHE_DIR": "/tmp/triton"}))
    assert shown == {"SGLANG_SIMULATE_ACC_LEN": "3", "TRITON_CACHE_DIR": "/tmp/triton"}
    assert "/tmp/triton" in environment.report()
