"""Compile the Triton kernels of all variants in parallel processes; the run then loads them from Triton's cache."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from .registry import candidates
from .shape import Shape, make_inputs
from .variant import NotApplicable, Setup


def _compile(name: str, index: int, shapes: list[Shape], capacity: int, window: int) -> str | None:
    """Run one candidate at every shape, as the check and as the timed run would; the reason if it fails."""
    device = torch.device("cuda")
    factory = candidates(name)[index]
    try:
        for shape in shapes:
            inputs = make_inputs(shape, torch.Generator(device).manual_seed(0), factory.packed_inputs)
            for fp32_output in {False, factory.output_before_cast}:
                variant = factory(Setup(shape, 1, capacity, device, window, fp32_output))
                variant.step(inputs)
        torch.cuda.synchronize()
    except NotApplicable as reason:
        return str(reason)
    except Exception as error:  # the main run meets it again, and reports it
        return f"{type(error).__name__}: {error}"
    return None


def precompile(
    names: list[str], shapes: list[Shape], capacity: int, window: int, jobs: int, progress: Callable[[str], None]
) -> None:
    """`jobs` worker processes; one task a candidate. FlashInfer compiles in its own process only, so it is left out."""
    tasks = [(n, i) for n in names if not n.startswith("flashinfer") for i in range(len(candidates(n)))]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        futures = {pool.submit(_compile, n, i, shapes, capacity, window): (n, i) for n, i in tasks}
        for done, future in enumerate(as_completed(futures), 1):
            name, index = futures[future]
            try:
                reason = future.result()
            except BrokenProcessPool:
                reason = "a compiling process died"
            progress(f"compiled {done}/{len(tasks)}: {name}[{index}]" + (f" -- {reason}" if reason else ""))
