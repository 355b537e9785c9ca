"""The streaming DataFrame of a processor: its source, the user's transform, and which of its operators keep state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from outbox_spark.source import FORMAT
from outbox_spark.writing.messages import writes_as_read

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from outbox_core.config import ProcessorConfig
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_spark.application import UserApplication

_STATEFUL: Final = frozenset(
    {
        "Aggregate", "Distinct", "Deduplicate", "DeduplicateWithinWatermark", "GlobalLimit", "FlatMapGroupsWithState",
        "FlatMapGroupsInPandasWithState", "TransformWithState", "TransformWithStateInPySpark",
        "TransformWithStateInPandas",
    }
)  # fmt: skip
_JOIN: Final = "Join"
_BATCH_ROWS: Final = 100_000
_BATCH_BYTES: Final = 32_000_000
"""Planning and committing cost each micro-batch as much as reading tens of thousands of messages."""


class StreamBuilder:
    """Makes the stream, from a start and above a floor."""

    def __init__(
        self, session: SparkSession, config: ProcessorConfig, directory: Path, application: UserApplication
    ) -> None:
        """Keep the parts; `directory` has connection files, at the same path on driver and executors."""
        self._session = session
        self._config = config
        self._directory = directory
        self._application = application

    def build(self, start: Checkpoint, floor: Checkpoint) -> DataFrame:
        """Make the streaming DataFrame whose rows go to the target or to `handle`."""
        options = {
            "connection": str(self._directory),
            "source": self._config.source.model_dump_json(by_alias=True),
            "interval": str(self._config.plan.trigger.processing_time.total_seconds()),
            # Where tasks read messages themselves, none reads the stream's rows: they need no pieces.
            "partitions": str(1 if writes_as_read(self._config) else self._config.plan.partitions),
            "start": str(start),
            "floor": str(floor),
        }
        options |= _limits(self._config.delivery.batch_size, self._config.delivery.batch_bytes)
        messages = self._session.readStream.format(FORMAT).options(**options).load()
        transform = self._application.transform
        return messages if transform is None else transform(messages)

    def output_mode(self, stateful: frozenset[str]) -> str:
        """Choose what of an operator's state is given out: changed rows for a SQL target, final ones for files."""
        to_sql = self._config.target is not None and self._config.target.sql is not None
        return "update" if to_sql and stateful and _JOIN not in stateful else "append"


def _limits(asked_rows: int | None, asked_bytes: int | None) -> dict[str, str]:
    """Bound a micro-batch by the rows and bytes that the user asked for; where that is nothing, by ours."""
    limits = {"batchSize": str(asked_rows or _BATCH_ROWS)}
    if asked_bytes is not None or asked_rows is None:
        limits["batchBytes"] = str(asked_bytes or _BATCH_BYTES)
    return limits


def find_stateful(rows: DataFrame) -> frozenset[str]:
    """Name the operators of a streaming query that keep state between micro-batches."""
    plan = rows._jdf.queryExecution().analyzed()  # noqa: SLF001 - PySpark shows no plan otherwise
    return frozenset(_walk(plan))


def _walk(node: Any) -> set[str]:
    found: set[str] = set()
    children = node.children()
    parts = [children.apply(index) for index in range(children.size())]
    name = str(node.nodeName()).partition(" ")[0]
    if node.isStreaming() and name in _STATEFUL:
        found.add(name)
    if name == _JOIN and len(parts) > 1 and all(part.isStreaming() for part in parts):
        found.add(name)
    for part in parts:
        found |= _walk(part)
    return found
