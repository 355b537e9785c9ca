"""PURE: a bar chart of one case as SVG, without a library."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from tests.tools.bench.table import format_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.bench.figures import Figure, Result

_SVG = "http://www.w3.org/2000/svg"
_WIDTH, _LEFT, _RIGHT = 900, 300, 110
_ROW, _TOP = 30, 64
_OURS, _OTHERS, _RANGE = "#1f6feb", "#8b949e", "#24292f"


def draw(title: str, figure: Figure, results: Sequence[Result]) -> str:
    """Return one bar for each candidate: its median, and a line from the least to the most."""
    bars = [(each, numbers) for each in results if (numbers := each.numbers(figure.name))]
    most = max((max(numbers) for _, numbers in bars), default=0.0) or 1.0
    scale = (_WIDTH - _LEFT - _RIGHT) / most
    height = _TOP + _ROW * len(bars) + 12
    better = "more is better" if figure.higher_is_better else "less is better"
    parts = [
        f'<svg xmlns="{_SVG}" width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="24" font-size="16" font-weight="bold">{escape(title)}</text>',
        f'<text x="12" y="45" fill="#57606a">{escape(figure.name)}, {better}; median, least and most</text>',
    ]
    for number, (each, numbers) in enumerate(bars):
        parts += _draw_bar(_TOP + _ROW * number, each, numbers, scale)
    return "\n".join([*parts, "</svg>", ""])


def _draw_bar(top: int, result: Result, numbers: list[float], scale: float) -> list[str]:
    middle, low, high = (_LEFT + value * scale for value in (median(numbers), min(numbers), max(numbers)))
    color = _OURS if result.ours else _OTHERS
    line = top + 10
    return [
        f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">{escape(result.name)}</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{middle - _LEFT:.1f}" height="20" fill="{color}"/>',
        f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{line}" y2="{line}" stroke="{_RANGE}" stroke-width="2"/>',
        f'<text x="{max(middle, high) + 6:.1f}" y="{top + 15}">{format_number(median(numbers))}</text>',
    ]
