"""Mode Partitioned beside mode Ordered, in one process and in two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.targets import Queue
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate

_EIGHT = {"mode": "Partitioned", "partitions": {"count": 8}}


def _candidates() -> list[Candidate]:
    return [
        OurWorker("Partitioned (8), one process", Queue("quorum"), delivery=_EIGHT, order=Order.KEY),
        OurWorker("Partitioned (8), two processes", Queue("quorum"), delivery=_EIGHT, order=Order.KEY, processes=2),
        OurWorker("Ordered", Queue("quorum"), baseline=True),
    ]


PARTITIONED = Case(
    name="partitioned",
    title="Mode Partitioned beside mode Ordered, into a quorum queue",
    about=(
        "A backlog of 1000 keys is published to one quorum queue, confirms awaited: in order per key by eight "
        "partitions in one process and in two, and in one order by mode Ordered."
    ),
    candidates=_candidates,
    measure=throughput.measure,
    figures=(throughput.RATE,),
    servers=("PostgreSQL", "RabbitMQ"),
)
