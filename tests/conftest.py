"""Where tests run: on the GPU if there is one, else on the CPU with Triton's interpreter."""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read by Triton when it is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not HAS_GPU:
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"
