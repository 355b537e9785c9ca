"""PURE: lays texts out in columns. It imports nothing: `outbox try` draws its table before much is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def format_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write each row as a line, with columns as wide as they need."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
