"""What the user's function is given beside the messages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from outbox_core.errors import HandlerError
from outbox_core.progress.checkpoint import Checkpoint
from outbox_spark.offsets import OffsetRange
from outbox_spark.writing.effects import Effects
from outbox_spark.writing.files import FileArea
from outbox_spark.writing.staging import StagingArea
from outbox_worker.postgres.connection import ConnectionFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
