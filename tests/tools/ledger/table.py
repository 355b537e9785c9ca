"""PURE: the ledger as people read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.tools.ledger.account import Account

HEADERS = ("processor", "produced", "handled", "lost", "duplicated", "out of order")


def format_accounts(accounts: Iterable[Account]) -> list[str]:
    """Align the accounts as lines of a table."""
    rows: list[tuple[str, ...]] = [HEADERS]
    for account in accounts:
        order = "-" if account.out_of_order is None else f"{account.out_of_order:,}"
        numbers = (account.produced, account.handled, account.lost, account.duplicated)
        rows.append((account.name, *(f"{number:,}" for number in numbers), order))
    return format_table(rows)


def format_table(rows: list[tuple[str, ...]]) -> list[str]:
    """Align the first column left, the others right, with a rule below the first row."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]
