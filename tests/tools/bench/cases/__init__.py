"""The table of cases. A new one is a module beside this with a `Case`, and a line below."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench.cases import (
    competing,
    growth,
    idle,
    kafka,
    latency,
    partitioned,
    python,
    rabbitmq,
    snapshot,
    spark,
    sql,
)

if TYPE_CHECKING:
    from tests.tools.bench.case import Case

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        rabbitmq.QUORUM,
        rabbitmq.CLASSIC,
        rabbitmq.STREAM,
        kafka.KAFKA,
        sql.SQL,
        snapshot.SNAPSHOT,
        python.PYTHON,
        competing.COMPETING,
        partitioned.PARTITIONED,
        partitioned.PARTITIONED_SQL,
        latency.LATENCY,
        idle.IDLE,
        idle.BESIDE_A_WRITER,
        growth.ROWS,
        growth.KEYS,
        growth.FILTER,
        growth.PARTITIONS,
        growth.BYTES,
        spark.SPARK,
    )
}
"""In the order in which they run."""
