"""What the user's function is given beside the messages."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from outbox_core.errors import HandlerError
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import Reason
from outbox_spark.offsets import OffsetRange
from outbox_spark.writing.effects import Effects
from outbox_spark.writing.files import FileArea
from outbox_spark.writing.staging import StagingArea
from outbox_worker.postgres.connection import ConnectionFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from outbox_spark.options import ReadOptions

WHOLE = OffsetRange(Checkpoint(815, 42), Checkpoint(920, 7))
FILES = ConnectionFiles(Path("/nowhere"))


def effects() -> Effects:
    return Effects(StagingArea(FILES, "outbox", "orders", 1), FileArea(FILES, "outbox", "orders", 1), WHOLE)


def test_a_batch_is_known_by_its_range():
    assert effects().range == WHOLE
    assert str(effects().range) == "815:42..920:7"


def test_a_relative_path_is_refused_before_anything_is_written():
    batch = effects()
    with pytest.raises(HandlerError, match="'orders' is not an absolute path"):
        batch.parquet(cast("DataFrame", None), "orders")
    assert batch.pending == []


@pytest.mark.parametrize("statement", ["SELECT 1; SELECT 2", "TRUNCATE orders", " "])
def test_what_is_no_single_statement_is_refused_before_anything_is_staged(statement):
    batch = effects()
    with pytest.raises(HandlerError, match=r"the statement of effects\.sql cannot be run: it ") as refused:
        batch.sql(cast("DataFrame", None), statement)
    assert refused.value.reason is Reason.STATEMENT_FAILED, (
        "an attempt of the handler's, as where the server refuses it"
    )
    assert batch.statements == []


class Writers:
    """Says who is asked to write."""

    def write(self, _rows: object, _path: object, _whole: object, options: object) -> list[str]:
        return ["Spark" if options is None else "who reads them"]


def test_messages_are_written_by_those_who_read_them_and_all_else_by_spark():
    read, made = SimpleNamespace(sparkSession=None), SimpleNamespace(sparkSession=None)
    options = cast("ReadOptions", "how")
    for known, rows, by in ((read, read, "who reads them"), (read, made, "Spark"), (None, read, "Spark")):
        staging, messages = StagingArea(FILES, "outbox", "orders", 1), cast("DataFrame", known)
        batch = Effects(staging, cast("FileArea", Writers()), WHOLE, messages, options)
        batch.parquet(cast("DataFrame", rows), "/orders")
        assert [str(each) for each in batch.pending] == [by]
