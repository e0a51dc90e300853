"""Quality against speed of fewer visual tokens, as an SVG drawn from assets/results/tokens.json.

    python benchmarks/plot_tokens.py        writes assets/results/tokens.svg

To the right: how many times less arithmetic the prefill takes (with ToMe: the encoder). Up: answers that are right, off
text. A line a method, from the whole run to its smallest share; controls dashed. Bars are paired 95 % intervals of the
loss.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "assets" / "results" / "tokens.json"
PLOT = _ROOT / "assets" / "results" / "tokens.svg"

_WIDTH, _HEIGHT = 860, 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 660, 30, 420
_COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#7a5195",
    "#8c564b",
    "#4d4d4d",
    "#17a589",
)


def main() -> None:
    """Writes the plot."""
    quality = json.loads(RESULTS.read_text(encoding="utf-8"))["quality"]
    PLOT.write_text(svg(quality), encoding="utf-8")


def svg(quality: Mapping[str, Any]) -> str:
    """The plot of a quality table."""
    rows = quality["rows"]
    lines = lines_of(rows)
    points = [point for line in lines.values() for point in line]
    most = max(1.5, *(x for x, _, _ in points))
    low = math.floor(min(y - half for _, y, half in points) / 5) * 5
    high = min(100, math.ceil(max(y + half for _, y, half in points) / 5) * 5)

    def at(x: float, y: float) -> tuple[float, float]:
        across = math.log(x) / math.log(most)
        return _LEFT + across * (_RIGHT - _LEFT), _BOTTOM - (y - low) / max(high - low, 1) * (_BOTTOM - _TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    parts += _axes(most, low, high, at)
    for index, (name, line) in enumerate(lines.items()):
        parts += _line(name, [(*at(x, y), at(x, y - half)[1], at(x, y + half)[1]) for x, y, half in line], index)
    asked = f"{quality['questions']} held-out questions, bundled model"
    parts.append(_text(_LEFT, 18, f"Answers right off text, %, against times less arithmetic; {asked}", "start"))
    return "\n".join([*parts, "</svg>", ""])


def lines_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float, float]]]:
    """(times less arithmetic, percent right, half width of the loss) of each method's points, fastest last."""
    whole = next(row for row in rows if row["method"] == "whole")
    start = (1.0, 100 * whole["off_text"]["accuracy"], 0.0)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        if row is not whole:
            speed = row["encoder_flops_x"] if row["method"] == "tome" else row["prefill_flops_x"]
            off_text = row["off_text"]
            found.setdefault(row["method"], [start]).append((speed, 100 * off_text["accuracy"], off_text["half_width"]))
    return {name: sorted(line) for name, line in found.items()}


def _axes(most: float, low: float, high: float, at: Any) -> list[str]:
    parts = [f'<path d="M{_LEFT} {_TOP}V{_BOTTOM}H{_RIGHT}" fill="none" stroke="black"/>']
    for y in range(int(low), int(high) + 1, 5 if high - low <= 50 else 10):
        _, place = at(1, y)
        parts.append(f'<path d="M{_LEFT} {place:.1f}H{_RIGHT}" stroke="#dddddd"/>')
        parts.append(_text(_LEFT - 8, place + 4, f"{y}", "end"))
    for x in (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10):
        if x <= most:
            place, _ = at(x, low)
            parts.append(f'<path d="M{place:.1f} {_BOTTOM}v5" stroke="black"/>')
            parts.append(_text(place, _BOTTOM + 20, f"{x:g}x", "middle"))
    label = "times less arithmetic in the prefill (ToMe: in the encoder)"
    return [*parts, _text((_LEFT + _RIGHT) / 2, _BOTTOM + 42, label, "middle")]


def _line(name: str, points: Sequence[tuple[float, float, float, float]], index: int) -> list[str]:
    """A method's line with its bars, and its entry in the legend. Controls are grey and dashed."""
    control = "random" in name
    colour = "#999999" if control else _COLOURS[index % len(_COLOURS)]
    dash = ' stroke-dasharray="5 4"' if control else ""
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y, _, _ in points)
    parts = [f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dash}/>']
    for x, y, bottom, top in points[1:]:
        parts.append(f'<path d="M{x:.1f} {bottom:.1f}V{top:.1f}" stroke="{colour}" stroke-opacity="0.5"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
    height = _TOP + 10 + 20 * index
    parts.append(f'<path d="M{_RIGHT + 20} {height}h24" stroke="{colour}" stroke-width="2"{dash}/>')
    return [*parts, _text(_RIGHT + 50, height + 4, name, "start")]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    escaped = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escaped}</text>'


if __name__ == "__main__":
    main()
