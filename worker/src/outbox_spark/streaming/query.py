"""One streaming query under one epoch: started from the stored checkpoint, it prepares batches until it is stopped.

Spark's thread runs `_on_batch`. Which messages a batch has is read from what Spark planned (directory.py), never
from its number. No exception leaves it as it came: Spark matches long tracebacks with a pattern that overflows its
stack, and then the query is dead without a word. The error is kept here, and Spark is told a short one.

Spark calls its sink in a thread of its own and goes on when the call returns. The call stages the batch, offers it
to the worker's loop and waits; the loop takes it, commits it in its transaction with the checkpoint, and says so by
asking for what comes after. Until then the batch stays offered, so a merge that failed is tried again without computing
anything again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from outbox_core.errors import HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_spark.failure import explain_failure
from outbox_spark.writing.effects import Effects
from outbox_spark.writing.files import FileArea, file_uri
from outbox_worker.logs import get_logger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_spark.offsets import OffsetRange
    from outbox_spark.stream import Stream
    from outbox_spark.streaming.directory import QueryDirectory
    from outbox_spark.writing.staging import StagingArea

_log = get_logger("outbox.spark.query")
_SPARK_NOTES_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A micro-batch whose effects wait, hidden, for the checkpoint's transaction.

    Attributes:
        whole: the range, after what was handled before.
        effects: what to commit; None for a batch that was handled before and is only to be answered 0.
        count: messages in it.

    """

    whole: OffsetRange
    effects: Effects | None
    count: int


class ClosedError(Exception):
    """The query is to end: nothing more is prepared or waited for."""


class Handover:
    """Where Spark's thread and the worker's loop meet; holds at most one batch of one query."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offered: PreparedBatch | None = None
        self._failure: OutboxError | None = None
        self._closed = False
        self._admitting = True
        self._committed = False
        self._busy_since: float | None = None

    def begin(self) -> None:
        """Spark's thread: a batch is to be prepared.

        Raises:
            ClosedError: none is wanted.

        """
        with self._changed:
            if self._closed or not self._admitting:
                raise ClosedError
            self._busy_since = time.monotonic()

    def offer(self, batch: PreparedBatch) -> None:
        """Spark's thread: wait until the loop has committed the batch.

        Raises:
            ClosedError: it will not be.

        """
        with self._changed:
            self._offered = batch
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._offered is None or self._closed)
            if self._offered is not None:
                raise ClosedError

    def end(self, failure: OutboxError | None = None) -> None:
        """Spark's thread: the batch is over, with its files in place, or failed."""
        with self._changed:
            self._busy_since = None
            self._committed = False
            self._failure = self._failure or failure
            self._changed.notify_all()

    def accept(self, stored: Checkpoint) -> None:
        """The loop: everything up to `stored` is committed, or answered."""
        with self._changed:
            if self._offered is not None and self._offered.whole.end <= stored:
                self._offered = None
                self._committed = True
                self._busy_since = time.monotonic()  # what is left to do is Spark's side of the commit
                self._changed.notify_all()

    def take(self, wait: float) -> PreparedBatch | None:
        """The loop: look at the batch on offer, waiting for one so many seconds at most. It stays on offer.

        Raises:
            OutboxError: preparing failed; said once.

        """
        with self._changed:
            self._changed.wait_for(lambda: self._offered is not None or self._failure is not None, timeout=wait)
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise failure
            return self._offered

    def busy_for(self) -> float | None:
        """For how many seconds has a batch been prepared? None: none is, or it is on offer already."""
        with self._changed:
            if self._busy_since is None or self._offered is not None:
                return None
            return time.monotonic() - self._busy_since

    def in_hand(self) -> bool:
        """Is there a batch: being prepared, on offer, or committed and not over yet on Spark's side?"""
        with self._changed:
            return self._busy_since is not None

    def stop_admitting(self) -> None:
        """Let the batch in hand end, and no other begin."""
        with self._changed:
            self._admitting = False

    def wait_settled(self, seconds: float) -> bool:
        """Wait until a committed batch is over on Spark's side too, its files in place; False: it is not yet."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._committed, timeout=seconds)

    def close(self) -> None:
        """Wait for nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class BatchEndedError(Exception):
    """Told to Spark in place of what happened."""


@dataclass(slots=True)
class QueryRun:
    """A query.

    Attributes:
        stored: the checkpoint it was started at: what lies at or before it is handled.
        stateful: its operators keep state, so a batch that was handled must still be computed again.
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
        messages = None if self.stream.application.transform else rows
        effects = Effects(self.staging, self.files, todo, messages, self.stream.read_options())
        self.stream.apply(rows, effects)
        self.handover.offer(PreparedBatch(todo, effects, self.stream.count(todo, effects)))
        if effects.pending:
            self.files.roll_forward()
        if effects.statements:
            self.staging.clear()
