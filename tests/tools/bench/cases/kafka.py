"""Mode Ordered into a topic of Kafka: idempotent producers, all confirms awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.debezium import Debezium
from tests.tools.bench.candidates.minimal import Minimal
from tests.tools.bench.candidates.targets import Topic
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidates() -> list[Candidate]:
    return [
        OurWorker("Ordered, batch 1000", Topic()),
        OurWorker("Ordered, batch 5000", Topic(), delivery={"batchSize": 5000}),
        Debezium(Topic()),
        Minimal(Topic(), 1000),
        Minimal(Topic(), 5000),
    ]


KAFKA = Case(
    name="kafka",
    title="Mode Ordered into a topic of Kafka",
    about=(
        "A backlog is published in order to a topic of one partition on one broker, by idempotent producers with "
        "acks=all; all confirms are awaited."
    ),
    candidates=_candidates,
    measure=throughput.measure,
    figures=(throughput.RATE,),
    servers=("PostgreSQL", "Kafka"),
)
