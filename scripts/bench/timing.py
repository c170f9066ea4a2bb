"""Device times: a step of all layers as one CUDA graph, replayed over whole fold cycles with changing acceptance."""

from __future__ import annotations

import statistics

import torch

from .shape import Inputs
from .variant import Variant

# Read between steps, outside the timed region: every layer's state and ring then come from device memory.
FLUSH_BYTES = 256 * 2**20
# GPU cycles to sleep before a pass, so that the host has queued the work before the device reaches it.
QUEUE_AHEAD_CYCLES = 6_000_000


class Timer:
    """Times passes over a table of acceptances, int32 [steps, B]; the first `skip` steps of a pass do not count."""

    def __init__(self, device: torch.device, skip: int) -> None:
        self.device, self.skip = device, skip
        self.cold = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=device)
        self.sink = torch.zeros((), dtype=torch.float32, device=device)

    @staticmethod
    def capture(variant: Variant, inputs: Inputs) -> torch.cuda.CUDAGraph:
        """One step (plan, every layer's verify, commit) as a graph. The warm-up compiles what is not compiled yet."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                variant.step(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            variant.step(inputs)
        return graph

    def measure(self, variant: Variant, graph: torch.cuda.CUDAGraph, table: torch.Tensor) -> float:
        """Mean microseconds per layer and step of one pass."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in table]
        torch.cuda._sleep(QUEUE_AHEAD_CYCLES)
        for accepted, (start, end) in zip(table, events, strict=True):
            variant.setup.set_accepted(accepted)
            torch.sum(self.cold, dim=0, out=self.sink)
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in events[self.skip :]]
        return 1e3 * statistics.fmean(times) / variant.setup.layers


def copy_bandwidth(device: torch.device, size: int = 4 * 2**30, repetitions: int = 15) -> float:
    """Bytes per second of a large device-to-device copy, read and written bytes both counted."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(repetitions + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * size / (1e-3 * statistics.median(times[3:]))
