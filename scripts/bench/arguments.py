"""Command-line arguments that several scripts take."""

from __future__ import annotations


def numbers(text: str) -> list[int]:
    """`1,8,64`."""
    return [int(part) for part in text.split(",")]
