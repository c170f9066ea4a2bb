"""Writes the tiny model to a directory that SGLang can serve."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from sglang_replayssm.tiny.config import TinyShape, model_config


def write_tiny_model(
    directory: str | Path,
    architecture: str = "qwen3_next",
    *,
    dtype: str = "bfloat16",
    seed: int = 0,
    weights: bool = True,
    **shape: int,
) -> Path:
    """Write `config.json` and, unless `weights` is false, `model.safetensors`.

    Serve it with `--skip-tokenizer-init` and prompts of token ids, and without weights with `--load-format dummy`.

    Args:
        directory: where to write; made if missing.
        architecture: "qwen3_next" (mixture of experts) or "qwen3_5" (dense, behind a multimodal wrapper: serve it
            with `enable_multimodal=False`).
        dtype: "float32" or "bfloat16", of the config and the tensors (`A_log` stays fp32).
        seed: the same seed gives the same tensors on every machine.
        shape: fields of `TinyShape`, for example `head_dim=128`.

    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    sizes = dataclasses.replace(TinyShape(), **shape)
    config = model_config(architecture, sizes, dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if weights:
        _write_weights(directory / "model.safetensors", architecture, sizes, dtype, seed)
    return directory


def _write_weights(path: Path, architecture: str, shape: TinyShape, dtype: str, seed: int) -> None:
    import torch
    from safetensors.torch import save_file

    from sglang_replayssm.tiny.weights import lively_weights

    target = getattr(torch, dtype)
    tensors = lively_weights(architecture, shape, seed)
    stored = {
        name: tensor.contiguous() if name.endswith("A_log") else tensor.to(target).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(stored, path, metadata={"format": "pt"})
