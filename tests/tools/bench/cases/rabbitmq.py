"""Mode Ordered into a queue of RabbitMQ: persistent messages, confirms awaited."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.article import NaiveLoop, OptimisedLoop
from tests.tools.bench.candidates.debezium import Debezium
from tests.tools.bench.candidates.minimal import Minimal
from tests.tools.bench.candidates.targets import Queue, Stream
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidates(kind: str) -> list[Candidate]:
    return [
        OurWorker("Ordered, batch 1000", Queue(kind)),
        OurWorker("Ordered, batch 5000", Queue(kind), delivery={"batchSize": 5000}),
        Debezium(Queue(kind)),
        Minimal(Queue(kind), 1000),
        Minimal(Queue(kind), 5000),
        NaiveLoop(kind),
        OptimisedLoop(kind, workers=5),
    ]


def _case(kind: str, note: str) -> Case:
    return Case(
        name=f"rabbitmq-{kind}",
        title=f"Mode Ordered into a {kind} queue of RabbitMQ",
        about=(
            f"A backlog is published in order to one {kind} queue ({note}), persistent, confirms awaited. The "
            "article's loops mark copies of the messages in their own tables, and the optimised one gives up the order."
        ),
        candidates=partial(_candidates, kind),
        measure=throughput.measure,
        figures=(throughput.RATE,),
        servers=("PostgreSQL", "RabbitMQ"),
    )


QUORUM = _case("quorum", "one node, so nothing is replicated")
CLASSIC = _case("classic", "durable")
_NUMBERED = {"cursor": "TransactionOrder"}
"""Numbers need one order of all messages."""
STREAM = Case(
    name="rabbitmq-stream",
    title="Mode Ordered into a stream of RabbitMQ",
    about=(
        "A backlog is published in order to one stream by its own protocol, each message with its number, so that the "
        "broker drops what it has; beside it the same worker into a quorum queue, and the minimal script into a stream "
        "by AMQP, which numbers nothing. All confirms are awaited."
    ),
    candidates=lambda: [
        OurWorker("into a stream, batch 1000", Stream(), source=_NUMBERED),
        OurWorker("into a stream, batch 5000", Stream(), source=_NUMBERED, delivery={"batchSize": 5000}),
        OurWorker("into a quorum queue, batch 1000", Queue("quorum"), source=_NUMBERED, baseline=True),
        Minimal(Stream(), 5000),
    ],
    measure=throughput.measure,
    figures=(throughput.RATE,),
    servers=("PostgreSQL", "RabbitMQ"),
)
