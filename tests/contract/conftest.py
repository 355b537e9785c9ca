"""What several tests of the contract begin with."""

from __future__ import annotations

import pytest

from outbox_worker.postgres.feeds import competing
from tests.support.database.consuming import JOBS, claim, join
from tests.support.servers.postgres import DEFAULT_VERSION


@pytest.fixture
def anywhere(servers, request):
    """The default version; on every version, and behind PgBouncer, where a test asks for that."""
    with servers.shared(getattr(request, "param", DEFAULT_VERSION)) as emptied:
        yield emptied


@pytest.fixture
def queue(database):
    """A connection to a database with a queue that one processor has joined."""
    connection = database.connect()
    claim(connection)
    competing.ensure_queue(connection, "outbox", "jobs", create=True)
    join(connection, JOBS)
    return connection
