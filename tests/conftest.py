"""Fixtures shared by all layers; what they do is in tests/support."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say what one process must run, where several share the tests (`tests/run.sh`): a file, and all that is heavy.

    Most tests wait for a lease or a server, so three at a time do no harm; Spark, the cluster and the model checker
    load both cores, so they come last and one after the other.
    """
    for item in items:
        heavy = _is_heavy(item)
        item.add_marker(pytest.mark.xdist_group("heavy" if heavy else str(item.path)))
    items.sort(key=_is_heavy)


def _is_heavy(item: pytest.Item) -> bool:
    marked = item.get_closest_marker("spark") or item.get_closest_marker("cluster")
    return marked is not None or "model" in item.path.parts


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
