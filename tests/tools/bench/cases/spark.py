"""Engine Spark beside Spark's own JDBC source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import throughput
from tests.tools.bench.candidates.spark import OurSpark, SparkJdbc
from tests.tools.bench.case import Case

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate


def _candidates() -> list[Candidate]:
    return [OurSpark(), SparkJdbc()]


SPARK = Case(
    name="spark",
    title="Engine Spark into Parquet files",
    about=(
        "A backlog is written as Parquet files by one Spark process with two threads that compute. Ours stores a "
        "checkpoint with each micro-batch, and shows its files with it; the JDBC source reads the whole backlog at "
        "once, and remembers nothing."
    ),
    candidates=_candidates,
    measure=throughput.measure,
    figures=(throughput.RATE,),
)
