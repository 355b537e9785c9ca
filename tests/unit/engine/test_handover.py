"""Spark's thread and the loop's meet."""

from __future__ import annotations

import threading

import pytest
from typing_extensions import override

from outbox_core.errors import HandlerError
from outbox_core.progress.checkpoint import Checkpoint
from outbox_spark.offsets import OffsetRange
from outbox_spark.streaming.query import ClosedError, Handover, PreparedBatch

BATCH = PreparedBatch(OffsetRange(Checkpoint(1, 1), Checkpoint(2, 2)), None, 5)


class SparkThread(threading.Thread):
    """Prepares one batch and says how it ended."""

    def __init__(self, handover: Handover) -> None:
        super().__init__(daemon=True)
        self.handover = handover
        self.ended = ""

    @override
    def run(self) -> None:
        try:
            self.handover.begin()
            self.handover.offer(BATCH)
        except ClosedError:
            self.ended = "closed"
        else:
            self.ended = "stored"
        self.handover.end()


def test_spark_goes_on_only_when_the_batch_is_stored():
    handover = Handover()
    spark = SparkThread(handover)
    spark.start()
    assert handover.take(5.0) == BATCH
    handover.accept(Checkpoint(2, 1))
    assert handover.take(0.0) == BATCH, "the same batch again: it is not stored"
    assert spark.ended == ""
    handover.accept(Checkpoint(2, 2))
    spark.join(5.0)
    assert spark.ended == "stored"
    assert handover.take(0.0) is None


def test_a_batch_that_is_not_stored_ends_with_the_query():
    handover = Handover()
    spark = SparkThread(handover)
    spark.start()
    assert handover.take(5.0) == BATCH
    handover.close()
    spark.join(5.0)
    assert spark.ended == "closed"


def test_no_batch_begins_once_the_driver_is_to_stop():
    handover = Handover()
    handover.stop_admitting()
    with pytest.raises(ClosedError):
        handover.begin()
    assert not handover.in_hand()


def test_a_query_ends_only_when_a_committed_batch_is_over_on_sparks_side_too():
    handover = Handover()
    moved = threading.Event()
    committed = threading.Event()

    def prepare() -> None:
        handover.begin()
        handover.offer(BATCH)
        committed.set()
        moved.wait(5.0)  # its files are being moved into place
        handover.end()

    spark = threading.Thread(target=prepare, daemon=True)
    spark.start()
    assert handover.take(5.0) == BATCH
    assert handover.wait_settled(0), "what is only on offer is rolled back, and nobody waits for it"
    handover.accept(BATCH.whole.end)
    assert committed.wait(5.0)
    handover.close()
    assert handover.in_hand()
    assert not handover.wait_settled(0.01)
    moved.set()
    assert handover.wait_settled(5.0)
    spark.join(5.0)
    assert not handover.in_hand()


def test_a_failure_is_said_once():
    handover = Handover()
    handover.begin()
    handover.end(HandlerError("no"))
    with pytest.raises(HandlerError, match="no"):
        handover.take(0.0)
    assert handover.take(0.0) is None


def test_preparing_is_timed_and_waiting_for_the_loop_is_not():
    handover = Handover()
    assert handover.busy_for() is None
    handover.begin()
    busy = handover.busy_for()
    assert busy is not None
    assert 0 <= busy < 60
    spark = threading.Thread(target=lambda: handover.offer(BATCH), daemon=True)
    spark.start()
    assert handover.take(5.0) == BATCH
    assert handover.busy_for() is None
    assert handover.in_hand(), "a driver that is to stop waits for it"
    handover.accept(BATCH.whole.end)
    spark.join(5.0)
