"""Progress on the terminal: a live bar where `rich` is installed and somebody looks, else a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

LINE_SECONDS = 10


class Display:
    """Use as a context manager; `update` takes a log record."""

    def __init__(self) -> None:
        self._bar = None
        self._last_line = 0.0
        self._last: tuple[float, int] | None = None
        if sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

                columns = (TextColumn("{task.percentage:5.1f} %"), BarColumn(), TimeElapsedColumn())
                self._bar = Progress(*columns, TextColumn("{task.description}"))

    def __enter__(self) -> Display:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Show a record of the log."""
        if self._bar:
            self._bar.update(self._task, completed=record["progress"], description=self._text(record))
        elif time.monotonic() - self._last_line > LINE_SECONDS:
            self._last_line = time.monotonic()
            print(f"{100 * record['progress']:5.1f} %  {self._text(record)}", file=sys.stderr, flush=True)

    def _text(self, record: dict[str, Any]) -> str:
        speed = 0.0
        if self._last and record["seconds"] > self._last[0]:
            speed = (record["tokens"] - self._last[1]) / (record["seconds"] - self._last[0])
        self._last = record["seconds"], record["tokens"]
        drafts = " ".join(f"{value:.3f}" for value in record["long_drafts"])
        return (
            f"step {record['step']}  {record['seconds']:.0f} s  rows of {record['length']}  "
            f"long {record['long']:.4f}  story {record['story']:.4f}  drafts {drafts}  {speed / 1000:.0f}k tokens/s"
        )
