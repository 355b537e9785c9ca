"""One streaming query under one epoch: started from the stored checkpoint, it prepares batches until it is stopped.

Spark's thread runs `_on_batch`. Which messages a batch has is read from what Spark planned (directory.py), never
from its number. No exception leaves it as it came: Spark matches long tracebacks with a pattern that overflows its
stack, and then the query is dead without a word. The error is kept here, and Spark is told a short one.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from outbox_core.errors import HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_spark.failure import explain_failure
from outbox_spark.streaming.handover import ClosedError, Handover, PreparedBatch
from outbox_spark.writing.effects import Effects, Messages
from outbox_spark.writing.files import FileArea, file_uri
from outbox_worker.logs import get_logger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_spark.stream import Stream
    from outbox_spark.streaming.directory import QueryDirectory
    from outbox_spark.writing.staging import StagingArea

_log = get_logger("outbox.spark.query")
_SPARK_NOTES_SECONDS: Final = 5.0


class BatchEndedError(Exception):
    """Told to Spark in place of what happened."""


@dataclass(slots=True)
class QueryRun:
    """A query.

    Attributes:
        directory: Spark's query checkpoint.
        stored: the checkpoint it was started at: what lies at or before it is handled.
        stateful: its operators keep state, so a batch that was handled must still be computed again.
        staging: for rows on their way into the database.
        files: for Parquet files.
        stream: says what a batch writes.
        handover: where the loop takes its batches.

    """

    directory: QueryDirectory
    stored: Checkpoint
    stateful: bool
    staging: StagingArea
    files: FileArea
    stream: Stream
    handover: Handover = field(default_factory=Handover)
    _last_batch: int = -1
    _query: StreamingQuery = field(init=False)

    def start(self, rows: DataFrame, output_mode: str) -> None:
        """Start it; when a micro-batch begins is the source's to say (`interval`): at once while there is more."""
        self._query = (
            rows.writeStream.foreachBatch(self._on_batch)
            .outputMode(output_mode)
            .option("checkpointLocation", file_uri(self.directory.location))
            .trigger(processingTime="0 seconds")
            .start()
        )

    def next_batch(self, *, wait: float, timeout: float) -> PreparedBatch | None:
        """Return the next batch; the same one until it is accepted, None where there is none after `wait` seconds.

        Preparing one may take `timeout` seconds.

        Raises:
            OutboxError: preparing failed, or the query ended; it cannot be used any more.

        """
        batch = self.handover.take(wait)
        if batch is None:
            self._check_alive()
            busy = self.handover.busy_for()
            if busy is not None and busy > timeout:
                raise HandlerError(
                    f"{self.stream.code} ran longer than delivery.timeout and was stopped; raise delivery.timeout, "
                    "lower delivery.batchSize, or give more executors",
                    reason=Reason.HANDLER_TIMEOUT,
                )
        return batch

    def stop(self) -> None:
        """End the query; a batch that is committed already is noted by Spark first, any other is rolled back."""
        self.handover.close()
        if self.handover.wait_settled(_SPARK_NOTES_SECONDS):
            self._wait_for_note()
        try:
            self._query.stop()
        except Exception as error:  # noqa: BLE001 - the JVM may be gone; then the query is, too
            _log.warning("the query did not stop cleanly", extra={"error": str(error)[:400]})

    def _wait_for_note(self) -> None:
        """Give Spark a moment to note the last batch: it saves the next start a replay."""
        deadline = time.monotonic() + _SPARK_NOTES_SECONDS
        while self._last_batch >= 0 and not self.directory.has_committed(self._last_batch):
            if time.monotonic() > deadline or not self._query.isActive:
                return
            time.sleep(0.02)

    def _check_alive(self) -> None:
        if self._query.isActive:
            return
        error = self._query.exception()
        if error is not None:
            raise explain_failure(error, self.stream.code)
        raise TransientError("the streaming query ended without an error", reason=Reason.INTERNAL_ERROR)

    def _on_batch(self, rows: DataFrame, batch_id: int) -> None:
        """Prepare a batch and wait until it is committed; called by Spark."""
        try:
            self.handover.begin()
        except ClosedError:
            raise BatchEndedError("no batch is wanted any more") from None
        failure: OutboxError | None = None
        try:
            self._run_batch(rows, batch_id)
        except ClosedError:
            pass
        except BaseException as error:  # noqa: BLE001 - every error must reach the loop
            failure = explain_failure(error, self.stream.code)
        else:
            self._last_batch = batch_id
            return
        finally:
            self.handover.end(failure)
        raise BatchEndedError("the batch is not committed")

    def _run_batch(self, rows: DataFrame, batch_id: int) -> None:
        whole = self.directory.range_of(batch_id)
        if whole.empty:
            return
        if whole.end <= self.stored:
            if self.stateful:
                rows.write.format("noop").mode("overwrite").save()
            self.handover.offer(PreparedBatch(whole, None, 0))
            return
        todo = whole.after(self.stored)
        messages = None if self.stream.application.transform else Messages(rows, self.stream.read_options())
        effects = Effects(self.staging, self.files, todo, messages)
        self.stream.apply(rows, effects)
        self.handover.offer(PreparedBatch(todo, effects, self.stream.count(todo, effects)))
        if effects.pending:
            self.files.roll_forward()
        if effects.statements:
            self.staging.clear()
