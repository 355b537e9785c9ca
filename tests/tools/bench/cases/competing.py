"""Mode Competing with a Python function called for each message, beside job queues."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.jobs import GRAPHILE, PG_BOSS, PGQUEUER, PROCRASTINATE, RIVER, OwnRows
from tests.tools.bench.candidates.tables import PythonNumbers
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidates() -> list[Candidate]:
    return [
        OurWorker(
            "Competing, one consumer", PythonNumbers(each=True), delivery={"mode": "Competing"}, order=Order.NONE
        ),
        OwnRows(
            GRAPHILE, 500, "graphile-worker, tuned",
            "concurrency 24, local queue 500, completion in batches (completeJobBatchDelay 0)",
        ),
        OwnRows(GRAPHILE, 1, "graphile-worker", "concurrency 24"),
        OwnRows(RIVER, 2000, "River", "2000 workers, FetchCooldown 2 ms, looks every 20 ms"),
        OwnRows(PGQUEUER, 1000, "PGQueuer", "batch 1000"),
        OwnRows(PG_BOSS, 5000, "pg-boss", "batch 5000, burstWhenBatchFull, looks every 500 ms (default 2 s)"),
        OwnRows(PROCRASTINATE, 30, "Procrastinate", "concurrency 30, jobs deleted"),
    ]  # fmt: skip


COMPETING = Case(
    name="competing",
    title="Mode Competing, a Python function for each message, one process",
    about=(
        "A backlog is handled in any order by one process that calls a function for each message; the function only "
        "notes the message's number. Ours reads the outbox, whose rows stay; the others delete or mark copies of them "
        "in their own tables."
    ),
    candidates=_candidates,
    measure=throughput.measure,
    figures=(throughput.RATE,),
)
