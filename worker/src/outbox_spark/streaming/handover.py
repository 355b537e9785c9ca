"""The meeting of two threads: Spark's, that prepares a micro-batch, and the worker's loop, that commits it.

Spark calls its sink in a thread of its own and goes on when the call returns. The call stages the batch, offers it
here and waits; the loop takes it, commits it in its transaction with the checkpoint, and says so by asking for what
comes after. Until then the batch stays offered, so a merge that failed is tried again without computing anything
again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_spark.offsets import OffsetRange
    from outbox_spark.writing.effects import Effects


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
    """Holds at most one batch. One query has one, and a new query a new one."""

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
