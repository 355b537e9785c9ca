"""Mode Ordered with a Python handler that is called for each batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.tables import PythonNumbers, SqlSums
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Case

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidates() -> list[Candidate]:
    return [
        OurWorker("Python handler, batch 1000", PythonNumbers()),
        OurWorker("Python handler, batch 5000", PythonNumbers(), delivery={"batchSize": 5000}),
        OurWorker("SQL statement, batch 1000", SqlSums(), baseline=True),
    ]


PYTHON = Case(
    name="python",
    title="Mode Ordered with a Python handler for each batch",
    about=(
        "A backlog is handled in order by a Python function that stores the numbers of its batch in one row, beside "
        "the SQL statement of the case `sql`."
    ),
    candidates=_candidates,
    measure=throughput.measure,
    figures=(throughput.RATE,),
)
