"""The cursor Snapshot beside TransactionOrder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.tables import SqlSums
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidate(cursor: str, batch: int, order: Order, *, baseline: bool = False) -> OurWorker:
    return OurWorker(
        f"{cursor}, batch {batch}", SqlSums(), source={"cursor": cursor}, delivery={"batchSize": batch},
        order=order, baseline=baseline,
    )  # fmt: skip


def _candidates() -> list[Candidate]:
    return [
        *(_candidate("Snapshot", batch, Order.COMMIT) for batch in (1000, 5000)),
        *(_candidate("TransactionOrder", batch, Order.TOTAL, baseline=True) for batch in (1000, 5000)),
    ]


SNAPSHOT = Case(
    name="snapshot",
    title="Mode Ordered with the cursor Snapshot beside TransactionOrder",
    about=(
        "A backlog is summed by one SQL statement for each batch, in the checkpoint's transaction: by the cursor "
        "Snapshot, whose order is that of the commits within each key, and by TransactionOrder, which has one order. "
        "Compare A and B with the batch of the same size."
    ),
    candidates=_candidates,
    measure=throughput.measure,
    figures=(throughput.RATE,),
)
