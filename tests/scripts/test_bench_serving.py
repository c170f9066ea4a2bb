"""The end-to-end benchmark without a server: commands, memory arithmetic, log parsing, clients against a stand-in."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
import sys
import threading
from pathlib import Path

import psutil
import pytest
from aiohttp import web

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS)]

from bench.serving import client, memory, profile, report  # noqa: E402
from bench.serving.model import SHAPES, gdn_layers, write_model  # noqa: E402
from bench.serving.server import FLAG, Launch, Server, StartFailed, free_port  # noqa: E402

KV = "KV Cache is allocated. dtype: torch.bfloat16, #tokens: 1000, K size: 0.50 GB, V size: 0.50 GB\n"
MAMBA = "Mamba Cache is allocated. max_mamba_cache_size: 9, conv_state size: 0.10GB, ssm_state size: 0.90GB "
STOCK = KV + MAMBA + "intermediate_ssm_state_cache size: 3.60GB intermediate_conv_window_cache size: 0.40GB \n"
RING = (
    KV + MAMBA + "\nGDN ReplaySSM ring allocated (fold=fp32): ring 0.150 GiB (10 rows x 1.0 MiB, 20 records), "
    "conv windows 0.050 GiB, state 1.000 GiB (10 slots x 1 MiB); stock's snapshots would take 4.000 GiB\n"
)


def script():
    spec = importlib.util.spec_from_file_location("bench_serving", SCRIPTS / "bench_serving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pools_from_logs():
    assert memory.parse(STOCK) == memory.Pools(9, 1.0, 4.0, 1.0, 1000)
    assert memory.parse(RING) == memory.Pools(9, 1.0, pytest.approx(0.2), 1.0, 1000)
    assert memory.parse(KV + STOCK).kv == 2.0, "target's and draft's caches add up"
    with pytest.raises(ValueError, match="mamba cache"):
        memory.parse(KV)


def test_largest_batch_fills_the_memory():
    pools = memory.parse(STOCK)
    n = memory.largest_batch(pools, tokens_per_request=100)

    def needed(requests: int) -> float:
        return (requests + 1) * 0.5 + requests * 100 * 1.0 / 1000

    assert needed(n) <= pools.total + 1e-9 < needed(n + 1)
    assert memory.largest_batch(memory.parse(RING), 100) > 0


def test_wave_summary():
    requests = [client.Request(11, 0.1, 1.1, 0), client.Request(11, 0.2, 2.2, 1)]
    wave = client.summarise(2, 2.0, requests)
    assert wave.tokens_per_second == 11.0 and wave.retractions == 1
    assert wave.median_tpot_ms == pytest.approx(150.0) and wave.median_ttft_ms == pytest.approx(150.0)


def test_launch_command(tmp_path):
    off, on = (Launch(tmp_path, flag, 136, extra=("--x", "1")).command(1234) for flag in (False, True))
    assert FLAG not in off and [word for word in on if word not in off] == [FLAG]
    assert on[on.index("--speculative-num-draft-tokens") + 1] == "4" and on[-2:] == ["--x", "1"]
    config = json.loads((write_model(tmp_path, "full") / "config.json").read_text())
    assert config["linear_num_value_heads"] == 32 and set(SHAPES) == {"full", "tiny"}


def test_dry_run_prints_both_sides(capsys):
    assert script().main(["--dry-run", "--server-args=--tp-size 1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("sglang.launch_server") == 2 and printed.count(FLAG) == 1
    assert printed.count("--tp-size 1") == 2 and printed.count("SGLANG_SIMULATE_ACC_LEN=3") == 2


def test_failed_start_shows_the_log(tmp_path, monkeypatch):
    command = [sys.executable, "-c", "print('no such flag'); raise SystemExit(3)"]
    monkeypatch.setattr(Launch, "command", lambda self, port: command)
    with (
        pytest.raises(StartFailed, match="exited with 3:\nno such flag"),
        Server(Launch(tmp_path, False, 8), tmp_path / "log", timeout=20),
    ):
        pass


def test_stop_ends_the_children_too(tmp_path, monkeypatch):
    program = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
http.server.BaseHTTPRequestHandler.do_GET = lambda self: (self.send_response(200), self.end_headers())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.BaseHTTPRequestHandler).serve_forever()
"""
    monkeypatch.setattr(Launch, "command", lambda self, port: [sys.executable, "-c", program, str(port)])
    with Server(Launch(tmp_path, False, 8), tmp_path / "log", timeout=20) as server:
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert family
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family)


def test_ports_leave_room_for_the_one_that_sglang_derives():
    """10,000 above at most, and that is below 65,536."""
    assert all(20_000 <= free_port() < 50_000 for _ in range(200))


@pytest.fixture
def stand_in():
    """A server that answers /generate as SGLang does: the first token at once, then the end."""
    port, loop = free_port(), asyncio.new_event_loop()

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        n = body["sampling_params"]["max_new_tokens"]
        response = web.StreamResponse()
        await response.prepare(request)
        for tokens in (1, n):
            await asyncio.sleep(0.02)
            chunk = {"output_ids": [100] * tokens, "meta_info": {"completion_tokens": tokens, "num_retractions": 0}}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    async def serve() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        return runner

    runner = loop.run_until_complete(serve())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield f"http://127.0.0.1:{port}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()


def test_wave_against_a_stand_in(stand_in):
    wave = client.wave(stand_in, concurrency=4, input_tokens=8, output_tokens=33, seed=0)
    assert wave.output_tokens == 4 * 33 and wave.median_tpot_ms > 0.3
    assert wave.median_ttft_ms > 10 and wave.retractions == 0


def test_tables(capsys):
    point = {"concurrency": 8, "tokens_per_second": 100.0, "median_tpot_ms": 5.0}
    pools = {"requests": 9, "state": 1.0, "scratch": 4.0, "kv": 1.0, "kv_tokens": 1000}
    runs = [
        {"side": "off", "points": [point], "pools": pools, "startup_seconds": 100.0},
        {"side": "on", "points": [point | {"tokens_per_second": 107.0}], "pools": pools, "startup_seconds": 90.0},
    ]
    from rich.console import Console

    console = Console(width=150)
    console.print(report.throughput_table(runs, [8, 16]), report.memory_table(runs))
    console.print(report.fixed_memory_table([{"side": "on", "n": 12, "wave": None, "pools": None, "error": "boom"}]))
    assert "+7.0" in capsys.readouterr().out


def trace(folder: Path, *names: str) -> Path:
    """Kernels of 2 us each, 1 us apart, in a trace as the profiler writes it."""
    events = [{"cat": "kernel", "name": name, "ts": 3.0 * i, "dur": 2.0} for i, name in enumerate(names)]
    path = folder / "0-TP-0.trace.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": [{"cat": "cpu_op", "name": "op", "ts": 0, "dur": 9}, *events[::-1]]}, file)
    return path


def test_profile(tmp_path):
    """Two steps of three layers: launches a step, shares of the busy time, and what runs around verify."""
    layer = ["void gemm<float>(int)", "conv", "_verify_hopper", "norm"]
    found = profile.summarise(trace(tmp_path, *["start"] * 6, *layer * 6, *["end"] * 3), layers=3)
    assert found.steps == 2
    by_name = {kernel.name: kernel for kernel in found.kernels}
    assert by_name["gemm"].per_step == 3 and by_name["end"].per_step == 1.5
    assert by_name["conv"].share == pytest.approx(6 / 33) and by_name["conv"].microseconds == 2
    assert found.busy_ms_per_step == pytest.approx(33e-3)
    around = {near.place: near for near in found.layer}
    assert [around[i].name for i in (-2, -1, 0, 1)] == ["gemm", "conv", "_verify_hopper", "norm"]
    assert around[0].gap == 1
    assert len(profile.tables("on", found)) == 2


def test_profile_without_verify(tmp_path):
    with pytest.raises(ValueError, match="no verify kernel"):
        profile.summarise(trace(tmp_path, "gemm"), layers=3)


def test_trace_that_never_ends(tmp_path):
    path = trace(tmp_path, "gemm")
    assert profile.wait_for_trace(tmp_path, timeout=1) == path
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TimeoutError):
        profile.wait_for_trace(tmp_path, timeout=0.1)


def test_gdn_layers():
    assert gdn_layers("full") == 30
