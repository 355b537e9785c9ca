"""PURE: the end of a run as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.chaos.recovery import by_kind, summarize
from tests.chaos.schedule import strikes
from tests.ledger.table import format_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.chaos.faults import Struck
    from tests.chaos.recovery import Recovery, Times
    from tests.chaos.verdict import Verdict

SHOWN = 10
"""Violations that are printed for each case; counting goes on."""


def format_ledger(verdicts: Sequence[Verdict], struck: Sequence[Struck], recoveries: Sequence[Recovery]) -> list[str]:
    """One line for each case."""
    rows: list[tuple[str, ...]] = [
        ("mode", "target", "produced", "handled", "lost", "doubled", "reordered", "faults", "recovery p50", "max")
    ]
    for verdict in verdicts:
        case, account = verdict.case, verdict.account
        faults = sum(strikes(one.fault, case) for one in struck)
        times = summarize([recovery for recovery in recoveries if recovery.case == case.name])
        doubled = f"{account.duplicated:,}" + ("" if case.transactional else " (allowed)")
        reordered = "-" if account.out_of_order is None else f"{account.out_of_order:,}"
        counts = (account.produced, account.handled, account.lost)
        rows.append(
            (case.mode, case.target, *(f"{n:,}" for n in counts), doubled, reordered, str(faults), *_format(times))
        )
    return format_table(rows)


def format_recoveries(struck: Sequence[Struck], recoveries: Sequence[Recovery]) -> list[str]:
    """One line for each kind of fault."""
    rows: list[tuple[str, ...]] = [("fault", "struck", "idle", "measured", "overlapped", "recovery p50", "max")]
    groups = by_kind(recoveries)
    for kind in sorted({one.fault.kind for one in struck}):
        of_kind = [one for one in struck if one.fault.kind == kind]
        found = groups.get(kind, [])
        times = summarize(found)
        rows.append(
            (
                kind,
                str(len(of_kind)),
                str(sum(one.harmless for one in of_kind)),
                str(times.count if times else 0),
                str(sum(recovery.overlapped for recovery in found)),
                *_format(times),
            )
        )
    return format_table(rows)


def format_violations(verdicts: Sequence[Verdict]) -> list[str]:
    """Everything that is wrong."""
    lines = []
    for verdict in verdicts:
        lines += [f"VIOLATION {verdict.case.name}: {violation}" for violation in verdict.violations[:SHOWN]]
        if len(verdict.violations) > SHOWN:
            lines.append(f"VIOLATION {verdict.case.name}: and {len(verdict.violations) - SHOWN} more")
    return lines


def _format(times: Times | None) -> tuple[str, str]:
    return ("-", "-") if times is None else (f"{times.p50:.2f} s", f"{times.longest:.2f} s")
