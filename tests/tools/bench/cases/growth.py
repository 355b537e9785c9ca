"""The time of a batch, with few rows and with many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.tools.bench import growth
from tests.tools.bench.case import Case
from tests.tools.bench.growth import FEW, MANY, Grown, Outbox
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate

_MODES: dict[str, tuple[Order, dict[str, Any], dict[str, Any]]] = {
    "Ordered, cursor Snapshot": (Order.COMMIT, {"cursor": "Snapshot"}, {}),
    "Ordered, cursor TransactionOrder": (Order.TOTAL, {"cursor": "TransactionOrder"}, {}),
    "Partitioned (8)": (Order.KEY, {}, {"mode": "Partitioned", "partitions": {"count": 8}}),
    "Competing": (Order.NONE, {}, {"mode": "Competing"}),
}


def _candidates() -> list[Candidate]:
    few, many = Outbox(FEW), Outbox(MANY)
    return [
        Grown(f"{name}, rows {'behind' if behind else 'ahead'}", outbox, *mode, behind=behind)
        for behind in (False, True)
        for name, mode in _MODES.items()
        for outbox in (few, many)
    ]


GROWTH = Case(
    name="growth",
    title="A table that grows",
    about=(
        f"The time of a batch of 1000 messages that a SQL statement sums, where {FEW:,} rows were handled before "
        f"(behind the cursor) or wait (ahead of it), and where {MANY:,} do. `times as long` is the one divided by the "
        "other, run by run: 1.00 means that the table's size costs nothing."
    ),
    candidates=_candidates,
    measure=growth.measure,
    figures=growth.FIGURES,
)
