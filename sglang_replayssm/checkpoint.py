"""How many bytes of weights a checkpoint folder holds, from its safetensors headers or index. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path

_LENGTH_BYTES = 8  # a safetensors file begins with the length of its JSON header, little-endian


def weight_bytes(directory: Path) -> int | None:
    """Bytes of all tensors: of the files that are there, else by the index; None if there is neither.

    Raises:
        ValueError: a file or an index that cannot be read as such.
    """
    files = sorted(directory.glob("*.safetensors"))
    index = directory / "model.safetensors.index.json"
    if files:
        return sum(map(_file_bytes, files))
    if not index.is_file():
        return None
    try:
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{index} gives no metadata.total_size: {error!r}") from error


def _file_bytes(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file (a pointer to one that was not downloaded?)")
        try:
            header = json.loads(file.read(length))
            spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
            return sum(end - begin for begin, end in spans)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no safetensors file: {error!r}") from error
