"""What Spark's query checkpoint directory says, and generations of it. The files are as Spark 4.3 writes them."""

from __future__ import annotations

import json

import pytest

from outbox_core.errors import PermanentError
from outbox_core.progress.checkpoint import Checkpoint
from outbox_spark.offsets import OffsetRange
from outbox_spark.streaming.directory import QueryDirectories, parse_offset_log
from outbox_spark.streaming.resume import Lineage

LINEAGE = Lineage("db-1")
START = Checkpoint(5, 5)


def plan(directory, batch_id: int, transaction_id: int, position: int) -> None:
    file = directory.location / "offsets" / str(batch_id)
    file.parent.mkdir(parents=True, exist_ok=True)
    offset = json.dumps({"transaction_id": str(transaction_id), "position": position})
    file.write_text(f'v1\n{{"batchWatermarkMs":0,"conf":{{}}}}\n{offset}')


def note(directory, batch_id: int) -> None:
    file = directory.location / "commits" / str(batch_id)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text('v1\n{"nextBatchWatermarkMs":0}')


def test_before_the_first_batch_everything_is_the_start(tmp_path):
    view = QueryDirectories(tmp_path, "orders").begin(LINEAGE, START).view()
    assert (view.committed, view.planned, view.has_state) == (START, START, False)


def test_planned_and_committed_are_read_from_sparks_logs(tmp_path):
    directory = QueryDirectories(tmp_path, "orders").begin(LINEAGE, START)
    plan(directory, 9, 6, 1)
    note(directory, 9)
    plan(directory, 10, 7, 1)
    (directory.location / "offsets" / ".10.crc").write_text("not a batch")
    view = directory.view()
    assert (view.committed, view.planned) == (Checkpoint(6, 1), Checkpoint(7, 1))
    assert directory.range_of(10) == OffsetRange(Checkpoint(6, 1), Checkpoint(7, 1))
    assert directory.has_committed(9)
    assert not directory.has_committed(10)


def test_the_first_batch_starts_where_the_directory_was_begun(tmp_path):
    directory = QueryDirectories(tmp_path, "orders").begin(LINEAGE, START)
    plan(directory, 0, 7, 1)
    assert directory.range_of(0) == OffsetRange(START, Checkpoint(7, 1))


def test_the_newest_generation_that_stands_is_current(tmp_path):
    directories = QueryDirectories(tmp_path, "orders")
    assert directories.current() is None
    first = directories.begin(LINEAGE, START)
    assert directories.current() == first
    second = directories.begin(Lineage("db-1", 3, 1_790_000_000_000_000), Checkpoint(9, 9))
    assert directories.current() == second
    assert not first.path.exists()
    (second.path.parent / "2").mkdir()  # a crash before its lineage was written
    assert directories.current() == second


def test_two_processors_never_share_a_directory(tmp_path):
    one = QueryDirectories(tmp_path, "a/b").begin(LINEAGE, START)
    other = QueryDirectories(tmp_path, "a_b").begin(LINEAGE, START)
    assert one.path != other.path


@pytest.mark.parametrize(
    "text",
    [
        pytest.param('v2\n{}\n{"transaction_id":"1","position":1}', id="another format"),
        pytest.param('v1\n{}\n{"transaction_id":"1","position":1}\n{}', id="two sources"),
        pytest.param('v1\n{}\n{"kafka":1}', id="another source"),
    ],
)
def test_an_offset_log_of_another_kind_is_refused(text, tmp_path):
    with pytest.raises(ValueError, match=r"expected format v1|not an outbox offset"):
        parse_offset_log(text)
    directory = QueryDirectories(tmp_path, "orders").begin(LINEAGE, START)
    plan(directory, 0, 7, 1)
    (directory.location / "offsets/0").write_text(text)
    with pytest.raises(PermanentError, match="the stored checkpoint is the authority"):
        directory.view()
