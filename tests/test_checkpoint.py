"""Bytes of weights without loading them."""

from __future__ import annotations

import json

import pytest

from sglang_replayssm.checkpoint import weight_bytes

torch = pytest.importorskip("torch")
save_file = pytest.importorskip("safetensors.torch").save_file


def write_index(directory, **metadata):
    index = {"metadata": metadata, "weight_map": {}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_the_tensors_of_all_files_count(tmp_path):
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16)}, tmp_path / "1.safetensors")
    save_file({"c": torch.zeros(11, dtype=torch.int8)}, tmp_path / "2.safetensors", metadata={"format": "pt"})
    write_index(tmp_path, total_size=1)  # what is there goes before what somebody wrote of it
    assert weight_bytes(tmp_path) == 3 * 5 * 4 + 7 * 2 + 11


def test_an_index_alone(tmp_path):
    write_index(tmp_path, total_size=71_903_645_408)
    assert weight_bytes(tmp_path) == 71_903_645_408


def test_neither(tmp_path):
    assert weight_bytes(tmp_path) is None


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"\x02" + bytes(7) + b"[]"])
def test_a_file_that_is_none_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is no safetensors file"):
        weight_bytes(tmp_path)


def test_an_index_without_a_size_is_named(tmp_path):
    write_index(tmp_path)
    with pytest.raises(ValueError, match="total_size"):
        weight_bytes(tmp_path)
