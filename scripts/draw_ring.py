"""Draw docs/figures/ring.svg: one request's ring over two verify steps, with a commit, a fold and the wrap-around.

    python scripts/draw_ring.py

Where cursors stand and which record is read, written or counted comes from `kernels/cursors/naive.py`, the oracle of
the kernel; a test draws the figure again and compares. To tell another story, change `story`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

import torch

from sglang_replayssm.kernels import Cursors, RingSpec
from sglang_replayssm.kernels.cursors import naive
from sglang_replayssm.kernels.ring import PLAN_BASE, PLAN_COUNT, PLAN_FOLD

OUT = Path(__file__).resolve().parents[1] / "docs" / "figures" / "ring.svg"

W, T = 8, 4
SPEC = RingSpec(
    layers=1,
    rows=1,
    num_k_heads=1,
    num_v_heads=1,
    head_k_dim=16,
    head_v_dim=16,
    window=W,
    max_draft_tokens=T,
    activation_dtype=torch.bfloat16,
)
ROW = torch.tensor([1])

COMMITTED, WINDOW, REJECTED, FREE, STATE = "#4c86c6", "#f2b134", "#e9e4d8", "#ffffff", "#3f8f6b"
INK, FAINT, ALARM = "#24292f", "#8b949e", "#b3402a"
CELL, STRIP_X, STATE_X, STATE_SIZE, ROW_HEIGHT, TOP, WIDTH = 42, 462, 352, 58, 124, 62, 1000

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"
  font-family="Helvetica, Arial, DejaVu Sans, sans-serif" font-size="14">
<title>Checkpoint, ring, cursors and fold of one request</title>
<defs>
<pattern id="hatch" width="7" height="7" patternTransform="rotate(45)" patternUnits="userSpaceOnUse">
<rect width="7" height="7" fill="{rejected}"/><path d="M0 0V7" stroke="#b9ae94" stroke-width="2"/>
</pattern>
<marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0L8 4L0 8z" fill="{alarm}"/>
</marker>
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#fcfcfd"/>
{body}
</svg>
"""


@dataclass(frozen=True)
class Frame:
    """One line of the figure.

    Attributes:
        title, text: what happens, and two short lines about it.
        base, count: cursors that the line shows, `cache_base` and `write_pos`.
        window: physical records of the window.
        accepted: how many of these were accepted; None before the commit.
        fold: whether the history is being folded.
    """

    title: str
    text: tuple[str, ...]
    base: int
    count: int
    window: tuple[int, ...] = ()
    accepted: int | None = None
    fold: bool = False


def story() -> Iterator[Frame]:
    """The frames, the cursors moved by the package's own code."""
    cursors = Cursors.allocate(SPEC, "cpu")
    cursors.position[1] = torch.tensor([1, 3], dtype=torch.int32)

    def at() -> dict[str, int]:
        base, count = cursors.position[1].tolist()
        return {"base": base, "count": count}

    def plan() -> tuple[tuple[int, ...], bool]:
        naive.plan_window(cursors, ROW, torch.tensor([0]))
        base, count, fold = cursors.plan[0, [PLAN_BASE, PLAN_COUNT, PLAN_FOLD]].tolist()
        return tuple((base + count + t) % SPEC.records for t in range(T)), bool(fold)

    def commit(accepted: int) -> None:
        naive.commit(cursors, ROW, torch.tensor([accepted]))

    yield Frame("Between two steps", ("Three tokens were committed", "since the checkpoint."), **at())
    before = at()
    window, fold = plan()
    yield Frame(
        "1  Verify",
        ("Reads checkpoint and ring, writes", f"T = {T} draft records behind them."),
        **before,
        window=window,
    )
    commit(3)
    yield Frame(
        "2  Commit: 3 of 4 accepted",
        ("write_pos += 3. The rejected draft", "is a record that nobody counts."),
        **at(),
        window=window,
        accepted=3,
    )
    before = at()
    window, fold = plan()
    yield Frame(
        "3  Verify that folds",
        (f"{before['count']} + T > W: no room for another window,", "so this launch also writes the checkpoint."),
        **before,
        window=window,
        fold=fold,
    )
    commit(2)
    yield Frame(
        "4  Commit: 2 of 4 accepted",
        ("cache_base has moved behind the six", "folded records, which are free now."),
        **at(),
        window=window,
        accepted=2,
    )
    before = at()
    window, fold = plan()
    yield Frame(
        "5  Verify", ("As in 1, now from the new checkpoint.", "The ring wraps around."), **before, window=window
    )


def draw() -> str:
    """The figure as SVG."""
    frames = list(story())
    height = TOP + ROW_HEIGHT * len(frames) + 8
    body = [_legend()]
    for index, frame in enumerate(frames):
        top = TOP + ROW_HEIGHT * index
        if index:
            body.append(f'<path d="M24 {top - 8}H{WIDTH - 24}" stroke="#e4e7eb"/>')
        new_state = any(earlier.fold for earlier in frames[:index])
        body += [_words(frame, top), _state(frame, top, new_state), _strip(frame, top), _cursors(frame, top)]
        if frame.fold:
            body.append(_fold_arrow(frame, top))
    return SVG.format(width=WIDTH, height=height, rejected=REJECTED, alarm=ALARM, body="\n".join(body))


def _legend() -> str:
    entries = (
        ("checkpoint", STATE),
        ("committed record", COMMITTED),
        ("draft record of the window", WINDOW),
        ("rejected", "url(#hatch)"),
        ("free", FREE),
    )
    parts, x = [], 24
    for name, fill in entries:
        parts.append(f'<rect x="{x}" y="20" width="16" height="16" rx="3" fill="{fill}" stroke="{INK}" opacity=".95"/>')
        parts.append(_text(x + 23, 33, name))
        x += 48 + round(7.0 * len(name))
    parts.append(_text(WIDTH - 24, 33, f"W = {W},  T = {T},  R = W + T = {SPEC.records}", anchor="end", fill=FAINT))
    return "".join(parts)


def _words(frame: Frame, top: int) -> str:
    lines = [_text(24, top + 30, frame.title, weight="bold", size=16)]
    lines += [_text(24, top + 54 + 19 * i, line) for i, line in enumerate(frame.text)]
    return "".join(lines)


def _state(frame: Frame, top: int, new_state: bool) -> str:
    y = top + 12
    stroke, width = (ALARM, 3) if frame.fold else (INK, 1)
    label = "S_c ← S_n" if frame.fold else "S_c"
    return (
        f'<rect x="{STATE_X}" y="{y}" width="{STATE_SIZE}" height="{STATE_SIZE}" rx="5" fill="{STATE}" '
        f'stroke="{stroke}" stroke-width="{width}"/>'
        + _text(STATE_X + STATE_SIZE / 2, y + 34, "S_c′" if new_state else "S_c", anchor="middle", fill="#fff", size=17)
        + _text(
            STATE_X + STATE_SIZE / 2,
            y + STATE_SIZE + 19,
            label if frame.fold else "frozen",
            anchor="middle",
            fill=ALARM if frame.fold else FAINT,
            size=13,
        )
    )


def _strip(frame: Frame, top: int) -> str:
    y = top + 20
    committed = {(frame.base + i) % SPEC.records for i in range(frame.count)}
    parts = []
    for record in range(SPEC.records):
        x = STRIP_X + CELL * record
        fill, ink = FREE, FAINT
        if record in committed:
            fill, ink = COMMITTED, "#fff"
        elif record in frame.window:
            fill, ink = (WINDOW, INK) if frame.accepted is None else ("url(#hatch)", INK)
        parts.append(
            f'<rect x="{x}" y="{y}" width="{CELL}" height="{CELL}" fill="{fill}" stroke="{INK}" stroke-width="1"/>'
        )
        parts.append(_text(x + CELL / 2, y + 26, str(record), anchor="middle", fill=ink, size=13))
    if frame.accepted is None:
        for run in _runs(frame.window):
            x, width = STRIP_X + CELL * run[0], CELL * len(run)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{width}" height="{CELL}" fill="none" stroke="{INK}" stroke-width="2.5"/>'
            )
    return "".join(parts)


def _cursors(frame: Frame, top: int) -> str:
    """The two cursors under the strip; `write_pos` is a length, so its arrow spans the committed records."""
    y, end = top + 62, (frame.base + frame.count) % SPEC.records
    base_x, end_x = STRIP_X + CELL * frame.base, STRIP_X + CELL * end
    parts = [f'<path d="M{base_x} {y + 3}l-5 9h10z" fill="{INK}"/>']
    parts.append(_text(base_x, y + 27, f"cache_base = {frame.base}", anchor="middle", size=13))
    parts.append(f'<path d="M{end_x} {y + 3}l-5 9h10z" fill="{COMMITTED}"/>')
    span = f'<path d="M{base_x + 9} {y + 8}H{end_x - 9}" stroke="{COMMITTED}" stroke-width="2"/>'
    parts.append(span)
    parts.append(_text(max(end_x, base_x + 110), y + 27, f"write_pos = {frame.count}", anchor="middle", size=13))
    return "".join(parts)


def _fold_arrow(frame: Frame, top: int) -> str:
    x = STRIP_X + CELL * frame.base
    return (
        f'<path d="M{x + CELL * frame.count / 2} {top + 19}C{x + 40} {top - 6},{STATE_X + 110} {top - 6},'
        f'{STATE_X + STATE_SIZE + 4} {top + 22}" fill="none" stroke="{ALARM}" stroke-width="2.5" '
        'marker-end="url(#head)"/>'
        + _text(x + CELL * frame.count / 2 + 12, top + 10, "fold", fill=ALARM, weight="bold")
    )


def _runs(records: tuple[int, ...]) -> list[list[int]]:
    """Consecutive records, split where the ring wraps."""
    runs: list[list[int]] = []
    for record in records:
        if runs and record == runs[-1][-1] + 1:
            runs[-1].append(record)
        else:
            runs.append([record])
    return runs


def _text(
    x: float,
    y: float,
    text: str,
    anchor: str = "start",
    fill: str = INK,
    weight: str = "normal",
    size: int = 14,
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}" '
        f'font-size="{size}">{escape(text)}</text>'
    )


def main() -> None:
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(draw(), encoding="utf-8")
    print(OUT)


if __name__ == "__main__":
    main()
