"""The data source `outbox`: `spark.readStream.format("outbox")` and `spark.read.format("outbox")`.

options.py reads the options, offsets.py splits ranges, reader.py reads them. Offsets are checkpoints. Register it with
`spark.dataSource.register(OutboxDataSource)`; it needs nothing of the operator.

Spark makes these objects several times over, in planning processes and in every task, so none is made with a
connection. The reader that plans a stream keeps its connection for some seconds: it looks again at each interval.

`commit` is left alone: Spark calls it one batch late, and for the last batch of an idle or bounded query never.
For effects and checkpoint in one transaction run the query by the driver (`python -m outbox_spark`).
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from typing_extensions import override

from outbox_spark.columns import MESSAGE_SCHEMA
from outbox_spark.offsets import OffsetRange, format_offset, parse_offset, parse_range

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import pyarrow as pa
    from pyspark.sql.types import StructType

    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_spark.options import ReadOptions
    from outbox_spark.reader import RangeReader

FORMAT: Final = "outbox"
_WAIT_SECONDS: Final = 0.2


class OutboxDataSource(DataSource):
    """Messages of an outbox, as a stream or up to an end."""

    @classmethod
    @override
    def name(cls) -> str:
        return FORMAT

    @override
    def schema(self) -> StructType:
        return MESSAGE_SCHEMA

    @override
    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        # Spark asks for name and schema in a process of their own: it shall load no more than they need.
        from outbox_spark.options import parse_options

        return OutboxStreamReader(parse_options(self.options))

    @override
    def reader(self, schema: StructType) -> DataSourceReader:
        from outbox_spark.options import parse_options

        return OutboxBatchReader(parse_options(self.options))


class OutboxStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches below the high-water mark, and reads their pieces."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._last: Checkpoint | None = None
        self._due = 0.0

    @cached_property
    def _reader(self) -> RangeReader:
        return _build_reader(self._options, keeps_connection=True)

    @override
    def initialOffset(self) -> dict[str, Any]:
        return format_offset(self._reader.fetch_start())

    @override
    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._options.batch_size)

    @override
    def latestOffset(self, start: Mapping[str, Any], limit: ReadLimit) -> dict[str, Any]:
        start_pair = parse_offset(start)
        if self._waits():
            return dict(start)
        after = max(start_pair, self._options.floor)
        full = False
        if isinstance(limit, ReadMaxRows):
            whole, full = self._reader.fetch_next(after, limit.max_rows)
        else:
            whole = OffsetRange(after, self._reader.fetch_settled())
        self._due = 0.0 if full else time.monotonic() + self._options.interval
        if self._last is not None and whole.end > self._last:
            whole = OffsetRange(after, self._last)
        if not whole.empty:
            return format_offset(whole.end, whole.count)
        # The very same as before, or Spark takes it for a batch: also with the count of the one before.
        return dict(start) if after == start_pair else format_offset(after)

    def _waits(self) -> bool:
        """Say whether it is too early for the next look, after a short wait: Spark asks again at once.

        The waits are short because Spark cannot interrupt one, and the query may be asked to end.
        """
        wait = self._due - time.monotonic()
        if wait > 0:
            time.sleep(min(wait, _WAIT_SECONDS))
        return wait > _WAIT_SECONDS

    @override
    def prepareForTriggerAvailableNow(self) -> None:
        self._last = self._reader.fetch_settled()

    @override
    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        whole = parse_range(parse_offset(start), end).after(self._options.floor)
        return _plan(self._reader, whole)

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)

    @override
    def stop(self) -> None:
        self._reader.close()


class OutboxBatchReader(DataSourceReader):
    """Reads from `start` to `end`, or to what is settled when it is planned: a bounded backfill."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    @override
    def partitions(self) -> Sequence[InputPartition]:
        reader = _build_reader(self._options)
        start = reader.fetch_start()
        settled = reader.fetch_settled()
        end = settled if self._options.end is None else min(self._options.end, settled)
        return _plan(reader, OffsetRange(start, end))

    @override
    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return _read(self._options, partition)


def _build_reader(options: ReadOptions, *, keeps_connection: bool = False) -> RangeReader:
    # Spark pickles these objects in a process that reads nothing: it shall not load the database's driver.
    from outbox_spark.reader import RangeReader

    return RangeReader(options, keeps_connection=keeps_connection)


def _plan(reader: RangeReader, whole: OffsetRange) -> list[InputPartition]:
    """Make a task of each piece."""
    return [InputPartition(piece) for piece in reader.fetch_pieces(whole)]


def _read(options: ReadOptions, partition: InputPartition) -> Iterator[pa.RecordBatch]:
    if partition.value is not None:  # Spark's own partition, where no piece is planned
        yield from _build_reader(options).read(partition.value)
