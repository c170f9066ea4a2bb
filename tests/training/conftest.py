"""scripts/ on the path, and the small model of these tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
sys.path.insert(0, str(Path(__file__).parent))  # for either of pytest's import modes

from small_model import SMALL
from training.model import DemoModel


@pytest.fixture
def model() -> DemoModel:
    """Norm weights are not at their initial 0 and 1, where an error in using them would not show."""
    model = DemoModel(SMALL, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


@pytest.fixture
def tokens() -> torch.Tensor:
    """[2, 90]: more than one chunk, and not a whole number of them."""
    return torch.randint(1, 120, (2, 90), generator=torch.Generator().manual_seed(3))
