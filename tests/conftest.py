"""Fixtures shared by all layers; what they do is in tests/support."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def servers() -> Iterator[postgres.Servers]:
    """PostgreSQL servers by version, started when first asked for."""
    running = postgres.Servers()
    yield running
    running.stop()


@pytest.fixture
def database(servers: postgres.Servers) -> Iterator[postgres.Database]:
    """A migrated database on the default version."""
    with servers.database() as fresh:
        yield fresh


@pytest.fixture
def empty_database(servers: postgres.Servers) -> Iterator[postgres.Database]:
    """A database without our schema."""
    with servers.database(template="empty_template") as fresh:
        yield fresh


@pytest.fixture(params=[*postgres.VERSIONS, postgres.POOLED])
def each_database(servers: postgres.Servers, request: pytest.FixtureRequest) -> Iterator[postgres.Database]:
    """An empty outbox on every version, and behind PgBouncer in transaction mode; many tests share the schema."""
    with servers.shared(request.param) as emptied:
        yield emptied
