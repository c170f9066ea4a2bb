"""The accuracy bars of the design: errors against fp64, as multiples of the fp32 sequential recurrence's own."""

from dataclasses import replace

import pytest
import torch
from lifecycle import Case, run

SMALL = Case(head_k_dim=64, head_v_dim=64, requests=1, padding=0)
LARGE = Case(head_k_dim=128, head_v_dim=128, requests=1, padding=0)


@pytest.mark.parametrize("regime", ["slow", "mixed", "fast"])
@pytest.mark.parametrize(("case", "steps"), [(SMALL, 24), (LARGE, 12)], ids=["K64", "K128"])
def test_bars(case: Case, steps: int, regime: str, device: str) -> None:
    errors = run(replace(case, regime=regime), steps, device)
    print(errors)
    assert errors.folds
    errors.check(regime)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_bars_of_other_dtypes(dtype: torch.dtype, device: str) -> None:
    errors = run(replace(SMALL, dtype=dtype), 20, device)
    print(errors)
    errors.check("mixed")
