"""PURE: the end of a run as people read it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from tests.tools.ledger.table import format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.chaos.result import Result

SHOWN = 10
"""Violations that are printed for each case; counting goes on."""


def format_result(result: Result) -> list[str]:
    """Everything, in lines."""
    found = "each was found" if not result.overlooked else "NOT all were found"
    return [
        "", *format_ledger(result), "", *format_recoveries(result), "",
        f"Leases that ended in mid-batch: {result.expired} of {result.frozen} frozen there.",
        f"Messages that committed later than one of their key with a higher pair: {result.overtaken:,}.",
        f"Self-test: a loss, a double, a swap, a stranger, a step back, a second owner: {found}.",
        *(f"OVERLOOKED {what}" for what in result.overlooked),
        *(f"MISSING {what}" for what in result.missing),
        *format_violations(result),
    ]  # fmt: skip


def format_ledger(result: Result) -> list[str]:
    """One line for each case."""
    rows: list[tuple[str, ...]] = [
        ("mode", "target", "produced", "handled", "lost", "doubled", "reordered", "moved back", "faults",
         "recovery p50", "max"),
    ]  # fmt: skip
    for case in result.cases:
        doubled = f"{case.doubled:,}" + (" (allowed)" if case.doubled_allowed else "")
        reordered = "-" if case.reordered is None else f"{case.reordered:,}"
        counts = (f"{n:,}" for n in (case.produced, case.handled, case.lost))
        rows.append(
            (case.mode, case.target, *counts, doubled, reordered, str(case.moved_back), str(case.faults),
             *_format(case.seconds)),
        )  # fmt: skip
    return format_table(rows)


def format_recoveries(result: Result) -> list[str]:
    """One line for each kind of fault."""
    rows: list[tuple[str, ...]] = [("fault", "struck", "idle", "measured", "overlapped", "recovery p50", "max")]
    for name, kind in sorted(result.kinds.items()):
        counts = (kind.struck, kind.idle, len(kind.seconds), kind.overlapped)
        rows.append((name, *(f"{n:,}" for n in counts), *_format(kind.seconds)))
    return format_table(rows)


def format_violations(result: Result) -> list[str]:
    """Everything that is wrong."""
    lines = []
    for name, violations in result.violations.items():
        lines += [f"VIOLATION {name}: {violation}" for violation in violations[:SHOWN]]
        if len(violations) > SHOWN:
            lines.append(f"VIOLATION {name}: and {len(violations) - SHOWN} more")
    return lines


def _format(seconds: Sequence[float]) -> tuple[str, str]:
    return (f"{median(seconds):.2f} s", f"{max(seconds):.2f} s") if seconds else ("-", "-")
