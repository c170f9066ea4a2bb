"""The final answer of a solution as an exact number."""

from __future__ import annotations

import re
from fractions import Fraction

# An integer with or without thousands separators, a decimal, or a fraction of two integers. A minus that follows a
# digit, a letter or a bracket is a subtraction or a hyphen.
_NUMBER = re.compile(
    r"""
    (?P<sign>(?<![\w)\]])-\s?)?
    (?P<value>\d{1,3}(?:,\d{3})+(?![\d])(?:\.\d+)? | \d+(?:\.\d+)? | (?<!\d)\.\d+)
    (?:\s*/\s*(?P<denominator>\d+))?
    """,
    re.VERBOSE,
)
_FRACTION = re.compile(r"(-?)\\[dt]?frac\s*(?:\{\s*(-?)\s*(\d+)\s*\}|(\d))\s*(?:\{\s*(\d+)\s*\}|(\d))")
# `#### 42`; a Markdown heading of that level begins with a word.
_MARK = re.compile(r"####\s*(?P<line>[^\w\n]*\d.*)")
_STATED = re.compile(r"answer\s*(?:is|=|:)\s*", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*")
_MARKUP = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it)|left|right|quad|displaystyle|[,;:! ])")


def number(text: str) -> Fraction | None:
    """The one number that `text` states: currency, units, markup and an equation's left side do not count.

    None if it holds no number or several, for then nobody can say which is meant.
    """
    found = numbers(text.rpartition("=")[2])
    return found[0] if len(found) == 1 else None


def numbers(text: str) -> list[Fraction]:
    """Every number of `text`, in order."""
    found = []
    for match in _NUMBER.finditer(_plain(text)):
        value = Fraction(match["value"].replace(",", ""))
        if match["denominator"]:
            if int(match["denominator"]) == 0:
                continue
            value /= int(match["denominator"])
        found.append(-value if match["sign"] else value)
    return found


def boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced; of the innermost one if boxes are nested."""
    for match in reversed(list(_BOX.finditer(text))):
        content = _group(text, match.end())
        if content is not None:
            return content
    return None


def gsm8k(text: str) -> Fraction | None:
    """Answer of a GSM8K solution: behind the last `####`, else the last box, else the last "answer is", else the last
    number of the text."""
    marks = list(_MARK.finditer(text))
    if marks and boxed(text[marks[-1].end() :]) is None:
        return _first(marks[-1]["line"])
    found = numbers(text)
    return _stated(text, otherwise=found[-1] if found else None)


def aime(text: str) -> Fraction | None:
    """Answer of an AIME solution, an integer from 0 to 999: the last box, else the last "answer is".

    No other number counts: the last number of a solution that was cut off is not an answer.
    """
    value = _stated(text)
    return value if value is not None and value.denominator == 1 and 0 <= value <= 999 else None


def _stated(text: str, otherwise: Fraction | None = None) -> Fraction | None:
    content = boxed(text)
    if content is not None:
        return number(content)
    statements = list(_STATED.finditer(text))
    value = _first(text[statements[-1].end() :].partition("\n")[0]) if statements else None
    return otherwise if value is None else value


def _first(text: str) -> Fraction | None:
    found = numbers(text)
    return found[0] if found else None


def _group(text: str, start: int) -> str | None:
    """The braced group that begins at `start`, or the digits there (TeX allows `\\boxed 7`); None if it never ends."""
    if not text.startswith("{", start):
        digits = re.match(r"-?\d+", text[start:])
        return digits[0] if digits else None
    depth = 0
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return None


def _plain(text: str) -> str:
    """Without currency, TeX markup and degree signs; fractions as a/b."""
    text = text.replace("−", "-").replace("–", "-").replace("{,}", "").replace(r"\$", "").replace("$", "")
    text = re.sub(r"(?<=\d)\\[,!](?=\d{3})", "", text)  # 1\,234 and 1\!234
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "", text)
    text = _FRACTION.sub(lambda m: f"{m[1] or m[2]}{m[3] or m[4]}/{m[5] or m[6]}", text)
    return re.sub(r"[{}*]", " ", _MARKUP.sub(" ", text))
