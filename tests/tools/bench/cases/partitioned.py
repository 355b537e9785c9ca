"""Mode Partitioned beside mode Ordered, in one process and in two."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.tables import SqlSums
from tests.tools.bench.candidates.targets import Queue
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.tools.bench.candidates.targets import Target
    from tests.tools.bench.case import Candidate

_EIGHT = {"mode": "Partitioned", "partitions": {"count": 8}}


def _candidates(make_target: Callable[[], Target]) -> list[Candidate]:
    return [
        OurWorker("Partitioned (8), one process", make_target(), delivery=_EIGHT, order=Order.KEY),
        OurWorker("Partitioned (8), two processes", make_target(), delivery=_EIGHT, order=Order.KEY, processes=2),
        OurWorker("Ordered", make_target(), baseline=True),
    ]


_COMPARED = "in order per key by eight partitions in one process and in two, and in one order by mode Ordered."

PARTITIONED = Case(
    name="partitioned",
    title="Mode Partitioned beside mode Ordered, into a quorum queue",
    about=f"A backlog of 1000 keys is published to one quorum queue, confirms awaited: {_COMPARED}",
    candidates=partial(_candidates, partial(Queue, "quorum")),
    measure=throughput.measure,
    figures=(throughput.RATE,),
    servers=("PostgreSQL", "RabbitMQ"),
)
PARTITIONED_SQL = Case(
    name="partitioned-sql",
    title="Mode Partitioned beside mode Ordered, into a table",
    about=(
        "A backlog of 1000 keys is summed by one SQL statement for each batch, in the checkpoint's transaction: "
        f"{_COMPARED} No broker takes part, so this measures the processor."
    ),
    candidates=partial(_candidates, SqlSums),
    measure=throughput.measure,
    figures=(throughput.RATE,),
)
