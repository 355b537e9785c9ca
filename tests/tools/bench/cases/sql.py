"""Mode Ordered into a table, in the checkpoint's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.jobs import EMMETT, OwnRows
from tests.tools.bench.candidates.tables import SqlRows, SqlSums
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidates() -> list[Candidate]:
    return [
        OurWorker("Ordered, an aggregate, batch 1000", SqlSums()),
        OurWorker("Ordered, an aggregate, batch 5000", SqlSums(), delivery={"batchSize": 5000}),
        OurWorker("Ordered, a row for each message", SqlRows()),
        *(OwnRows(EMMETT, batch, f"Emmett, batch {batch}", "eachMessage, looks every 10 ms") for batch in (100, 5000)),
    ]


SQL = Case(
    name="sql",
    title="Mode Ordered into a table, in the checkpoint's transaction",
    about=(
        "A backlog is handled in order by one SQL statement for each batch: sums for each of 1000 keys, or a row for "
        "each message. Emmett reads copies of the messages in its own table, and calls a function that only notes each "
        "number."
    ),
    candidates=_candidates,
    measure=throughput.measure,
    figures=(throughput.RATE,),
)
