"""What runs while nothing arrives."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tests.tools.bench import idle
from tests.tools.bench.candidates.debezium import Debezium
from tests.tools.bench.candidates.jobs import GRAPHILE, PGQUEUER, OwnRows
from tests.tools.bench.candidates.minimal import Minimal
from tests.tools.bench.candidates.tables import SqlSums
from tests.tools.bench.candidates.targets import Queue
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate

_MODES: dict[str, dict[str, Any]] = {
    "Ordered": {},
    "Partitioned (8)": {"mode": "Partitioned", "partitions": {"count": 8}},
    "Competing": {"mode": "Competing"},
}


def _candidates() -> list[Candidate]:
    return [
        *(OurWorker(name, SqlSums(), delivery=delivery, paused=False) for name, delivery in _MODES.items()),
        Debezium(Queue("classic"), poll_ms=500),
        OwnRows(GRAPHILE, 1, "graphile-worker", "concurrency 24"),
        OwnRows(PGQUEUER, 1000, "PGQueuer", "batch 1000"),
        Minimal(Queue("classic"), 1000, listen=True),
    ]


IDLE = Case(
    name="idle",
    title="Idle: no message arrives",
    about="CPU time of the process and of PostgreSQL, and transactions, while no message is committed; less is better.",
    candidates=_candidates,
    measure=idle.measure,
    figures=idle.FIGURES,
)

BESIDE_A_WRITER = replace(
    IDLE,
    name="idle-beside-a-writer",
    title="Idle: no message arrives, and another program commits",
    about=f"{IDLE.about} Meanwhile another program commits 50 times a second into a table that nothing reads.",
    measure=idle.measure_beside_a_writer,
)
