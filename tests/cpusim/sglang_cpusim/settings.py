"""The environment and the engine arguments that a run on the CPU needs, in one place."""

from __future__ import annotations

from typing import Any


def environment() -> dict[str, str]:
    """Environment of the engine's process. TRITON_INTERPRET must be set before anything imports a Triton kernel."""
    return {
        "CPUSIM": "1",
        "TRITON_INTERPRET": "1",
        "TORCHDYNAMO_DISABLE": "1",  # inductor would compile for half a minute at the first step
        "HF_HUB_OFFLINE": "1",
        "SGLANG_PLUGINS": "cpusim,replayssm",
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "OMP_NUM_THREADS": "1",  # the tensors are tiny: more threads only fight the other processes
    }


def engine_arguments() -> dict[str, Any]:
    """Keyword arguments of `sglang.Engine`. fp32, because only there may two batch compositions be compared exactly."""
    return {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "triton",
        "grammar_backend": "none",
        "disable_cuda_graph": True,
        "enable_multimodal": False,
        "skip_tokenizer_init": True,
        "mem_fraction_static": 0.3,
        "max_total_tokens": 2048,
        "watchdog_timeout": 3000,
    }
