"""What tests of worker processes stand on: a database with messages, and a directory for the processes' files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.worker import Outbox, Workers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers.postgres import Database


@pytest.fixture
def outbox(database: Database) -> Outbox:
    """An outbox with a table `handled` for effects."""
    return Outbox(database)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    """Starts worker processes and ends what is left of them."""
    running = Workers(tmp_path)
    yield running
    running.stop()
