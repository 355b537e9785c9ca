"""What a processor does with its messages: how they are read and transformed, and what is written of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from outbox_core.errors import HandlerError
from outbox_spark.options import ReadOptions, parse_options
from outbox_spark.reader import RangeReader
from outbox_spark.source import FORMAT
from outbox_spark.writing.files import writes_as_read

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from outbox_core.config import ProcessorConfig
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_spark.application import UserApplication
    from outbox_spark.offsets import OffsetRange
    from outbox_spark.writing.effects import Effects

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


@dataclass(frozen=True, slots=True)
class Stream:
    """The stream of a processor; `source` is a folder of connection files, at one path on driver and executors."""

    config: ProcessorConfig
    source: Path
    application: UserApplication

    @property
    def code(self) -> str:
        """What to call the user's part in messages."""
        named = self.config.plan.application
        if named is None:
            return "the batch"
        return f"{named.module}.{'handle' if self.application.handle else 'transform'}"

    def build(self, session: SparkSession, start: Checkpoint, floor: Checkpoint) -> DataFrame:
        """Make the streaming DataFrame whose rows go to the target or to `handle`, from a start and above a floor."""
        options = self._options | {
            "interval": str(self.config.plan.trigger.processing_time.total_seconds()),
            "start": str(start),
            "floor": str(floor),
        }
        if writes_as_read(self.config):
            options["partitions"] = "1"  # tasks read messages themselves, and none reads the stream's rows
        options |= _limits(self.config.delivery.batch_size, self.config.delivery.batch_bytes)
        messages = session.readStream.format(FORMAT).options(**options).load()
        transform = self.application.transform
        return messages if transform is None else transform(messages)

    def output_mode(self, stateful: frozenset[str]) -> str:
        """Choose what of an operator's state is given out: changed rows for a SQL target, final ones for files."""
        to_sql = self.config.target is not None and self.config.target.sql is not None
        return "update" if to_sql and stateful and _JOIN not in stateful else "append"

    def read_options(self) -> ReadOptions:
        """Return how messages are read, by tasks and where they are counted."""
        return parse_options(self._options)

    def apply(self, rows: DataFrame, effects: Effects) -> None:
        """Collect a batch's effects: the user's `handle`, or the target."""
        target = self.config.target
        if self.application.handle is not None:
            self.application.handle(rows, effects)
        elif target is not None and target.sql is not None:
            effects.run(rows, target.sql.statement, "target.sql.statement")
        elif target is not None and target.parquet is not None:
            effects.parquet(rows, target.parquet.path)
        else:
            raise HandlerError("engine Spark knows target.sql, target.parquet, or an application with handle()")

    def count(self, whole: OffsetRange, effects: Effects) -> int:
        """Count the messages of a range, of which there are these effects."""
        if writes_as_read(self.config):
            return sum(file.rows for file in effects.pending)
        return RangeReader(self.read_options()).fetch_count(whole)

    @property
    def _options(self) -> dict[str, str]:
        return {
            "connection": str(self.source),
            "source": self.config.source.model_dump_json(by_alias=True),
            "partitions": str(self.config.plan.partitions),
        }


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
