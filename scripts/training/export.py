"""The model as a checkpoint that SGLang and Transformers load, and back."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from sglang_replayssm.demo_task import vocabulary
from sglang_replayssm.demo_task.tokenizer import write_tokenizer
from training.model import DemoModel
from training.shape import ModelShape

WEIGHTS = "model.safetensors"
MAX_BYTES = 16_000_000


def export(model: DemoModel, directory: str | Path, dtype: str = "bfloat16") -> Path:
    """Write config, generation config, tokenizer and weights (`A_log` in fp32, the rest in `dtype`).

    Raises:
        ValueError: the weights take more than `MAX_BYTES`; nothing is written then.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    target = getattr(torch, dtype)
    tensors = {
        name: (tensor if name.endswith("A_log") else tensor.to(target)).cpu().contiguous()
        for name, tensor in model.state_dict().items()
    }
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > MAX_BYTES:
        raise ValueError(f"the weights take {size:,} bytes, more than {MAX_BYTES:,}")
    directory.mkdir(parents=True, exist_ok=True)
    _write(directory / "config.json", model.shape.config(dtype))
    _write(directory / "generation_config.json", {"eos_token_id": vocabulary.END_ID, "do_sample": False})
    write_tokenizer(directory)
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def load_export(directory: str | Path, dtype: torch.dtype) -> DemoModel:
    """The exported model again, computing in `dtype`."""
    from safetensors.torch import load_file

    directory = Path(directory)
    model = DemoModel(ModelShape.from_config(json.loads((directory / "config.json").read_text())), dtype)
    model.load_state_dict(load_file(directory / WEIGHTS))
    return model.eval()


def _write(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
