"""The answer in a solution, on awkward ones."""

from __future__ import annotations

import importlib.util
import sys
from fractions import Fraction
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path[:0] = [str(SCRIPTS)]

from evaluation import answers  # noqa: E402


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#### 42", 42),
        ("####42", 42),
        ("It costs 3 * 4 = 12.\n#### $1,234.00.", 1234),
        ("#### -7", -7),
        ("#### −7", -7),
        ("#### $-7", -7),
        ("#### -$7", -7),
        ("#### 42 apples", 42),
        ("#### **42**", 42),
        ("#### \\$42", 42),
        ("#### 1\n#### 2", 2),
        ("#### 18.00", 18),
        ("#### 0.5", Fraction(1, 2)),
        ("#### 1/2", Fraction(1, 2)),
        ("#### .5", Fraction(1, 2)),
        ("#### Step 2: the rest\nThey pay 30 dollars.\nThe answer is 30.", 30),
        ("#### 2. The rest\nSo \\boxed{30}.", 30),
        ("#### ", None),
        ("She buys 3 and sells 5, so 8 in all.", 8),
        ("12 apples at 3 dollars are 36 dollars.", 36),
        ("The answer is: **1,234** dollars, not 5.", 1234),
        ("The answer is $18. I checked 3 ways.", 18),
        ("The answer is 5. No: the final answer is 6.", 6),
        ("So \\boxed{72}. There were 2 steps.", 72),
        ("A tram for $1,000,000 and 1,2 other things", 2),
        ("It drops from 10-3", 3),
        ("It is -3", -3),
        ("There were 10 pages.", 10),
        ("The box is \\boxed{3 \\text{ or } 5}.", None),
        ("100%", 100),
        ("Nothing at all.", None),
        ("1/0", None),
        ("", None),
    ],
)
def test_gsm8k(text, expected):
    assert answers.gsm8k(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\\boxed{042}", 42),
        ("\\boxed{000}", 0),
        ("\\boxed{999}", 999),
        ("\\boxed{1000}", None),
        ("\\boxed{-1}", None),
        ("\\boxed{\\frac{1}{2}}", None),
        ("\\boxed{\\frac{84}{2}}", 42),
        ("\\boxed{\\dfrac{84}2}", 42),
        ("\\boxed{42.0}", 42),
        ("\\boxed{\\text{the answer is }\\mathbf{42}}", 42),
        ("\\boxed{\\boxed{7}}", 7),
        ("\\boxed{m+n = 42}", 42),
        ("\\boxed{42^\\circ}", 42),
        ("\\boxed{42^{\\circ}}", 42),
        ("\\boxed{42\\%}", 42),
        ("\\boxed{2^{5}}", None),
        ("\\boxed 7", 7),
        ("\\boxed{1} and then \\boxed{2}", 2),
        ("\\boxed{1} and then \\boxed{2", 1),
        ("\\fbox{17}", 17),
        ("The answer is 042.", 42),
        ("Therefore m + n = 42, and", None),
        ("\\boxed{}", None),
        ("", None),
    ],
)
def test_aime(text, expected):
    assert answers.aime(text) == expected


@pytest.mark.parametrize(
    "text", ["1{,}234", "1\\,234", "1\\!234", "1,234", "\\$1,234", "1234.0", "1234 units", "x=1234"]
)
def test_number_ignores_dress(text):
    assert answers.number(text) == 1234


@pytest.mark.parametrize(
    ("text", "expected"),
    [("-\\frac{3}{4}", Fraction(-3, 4)), ("\\tfrac34", Fraction(3, 4)), ("\\frac{-3}{4}", Fraction(-3, 4))],
)
def test_fractions(text, expected):
    assert answers.number(text) == expected


def test_exemplars_end_as_they_ask_for():
    spec = importlib.util.spec_from_file_location("eval_gsm8k", SCRIPTS / "eval_gsm8k.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for _, solution in module.EXEMPLARS:
        last = solution.splitlines()[-1]
        assert last.startswith("#### ") and answers.gsm8k(solution) == int(last.removeprefix("#### "))
