"""The engines of a soak: arguments and environment of both sides."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sglang_replayssm.tiny import write_tiny_model
from soak.workload import Sizes

RADIX = ("off", "no_buffer", "extra_buffer")

NEXTN = {
    "speculative_algorithm": "NEXTN",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
# Heads of Qwen3.5-35B-A3B, which the Hopper kernel serves.
GPU_SHAPE = {
    "head_dim": 128,
    "num_k_heads": 16,
    "num_v_heads": 32,
    "hidden_size": 1024,
    "attention_head_dim": 128,
    "num_attention_heads": 8,
    "num_layers": 8,
}
GPU_ARGUMENTS = {
    "dtype": "bfloat16",
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "moe_runner_backend": "triton",
    "enable_multimodal": False,
    "skip_tokenizer_init": True,
    "mem_fraction_static": 0.3,
    "cuda_graph_backend_prefill": "disabled",
}
# Slots a running request for itself, for what tracking needs and for cached states: few, so that states are evicted.
SLOTS = {"off": 2, "no_buffer": 4, "extra_buffer": 6}


def write_model(directory: Path, architecture: str, on_gpu: bool) -> Path:
    """The tiny model, in bf16 and with heads of a real one on a GPU."""
    shape = GPU_SHAPE if on_gpu else {}
    return write_tiny_model(directory, architecture, dtype="bfloat16" if on_gpu else "float32", **shape)


def vocabulary(model: Path) -> int:
    """Tokens that the model has."""
    config = json.loads((model / "config.json").read_text())
    return config.get("text_config", config)["vocab_size"]


def engine(options: argparse.Namespace, model: Path, sizes: Sizes, on_gpu: bool) -> tuple[dict[str, Any], dict]:
    """Arguments of `sglang.Engine` and environment that both sides have.

    KV memory holds the longest conversation, and little more than a full batch of average ones: prefixes are evicted
    and requests are retracted.
    """
    if on_gpu:
        base, env = GPU_ARGUMENTS, {}
    else:
        from sglang_cpusim import engine_arguments, environment

        base, env = engine_arguments(), environment()
    slots = max(8, SLOTS[options.radix] * options.concurrency)
    arguments = {
        **base,
        **NEXTN,
        "model_path": str(model),
        "log_level": "info",
        "max_running_requests": options.concurrency,
        "max_mamba_cache_size": slots,
        "max_total_tokens": options.kv_tokens or sizes.longest + options.concurrency * sizes.longest // 4,
        "chunked_prefill_size": 256 if on_gpu else 16,
        "disable_radix_cache": options.radix == "off",
        "disable_overlap_schedule": options.radix == "no_buffer",
        "random_seed": options.seed,
    }
    if options.radix != "off":
        arguments["mamba_radix_cache_strategy"] = options.radix
        # Short of SGLang's 256, so that answers cross it; on a CPU inside most windows.
        arguments["mamba_track_interval"] = 64 if on_gpu else 6
    return arguments, env


def ring(options: argparse.Namespace) -> dict[str, Any]:
    """What one side has beyond the other."""
    return {
        "enable_gdn_replayssm_spec": True,
        "gdn_replayssm_fold": options.fold,
        "gdn_replayssm_cache_len": options.cache_len,
    }
