"""The time from COMMIT to a consumer of the queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import latency
from tests.tools.bench.candidates.debezium import Debezium
from tests.tools.bench.candidates.minimal import Minimal
from tests.tools.bench.candidates.targets import Queue
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidates() -> list[Candidate]:
    return [
        OurWorker("Ordered", Queue("classic")),
        OurWorker("Ordered, pollInterval 10ms", Queue("classic"), delivery={"pollInterval": "10ms"}),
        Debezium(Queue("classic")),
        Minimal(Queue("classic"), 1000, listen=True),
    ]


LATENCY = Case(
    name="latency",
    title="From COMMIT to a consumer, through a classic queue",
    about=(
        "Single rows are committed 100 and 1000 times a second. Measured is the time from the return of COMMIT to the "
        "arrival of the message at a consumer of the queue; less is better."
    ),
    candidates=_candidates,
    measure=latency.measure,
    figures=latency.FIGURES,
    servers=("PostgreSQL", "RabbitMQ"),
    cpu="CPU microseconds a message at 1000/s, of PostgreSQL with the commits of the producer",
)
