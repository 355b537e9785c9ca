"""Fixtures shared by all layers; what they do is in tests/support."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests.support import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator

# How long an example takes says how busy the machine is.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


SPARK = "tests/integration/test_spark_"
"""Files that wait for JVMs, and are patient: after the light ones, beside each other."""
HEAVY = (
    "tests/model/",
    "tests/chart/test_release",
    "tests/chart/test_server",
    "tests/chaos/",
    "tests/acceptance/",
)
"""Files that load both cores: model checker, cluster and chaos. They run last, in one process."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what is heavy last."""
    items.sort(key=lambda item: 2 * item.nodeid.startswith(HEAVY) + item.nodeid.startswith(SPARK))


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives a file to one process, and all that is heavy: most tests wait, so several at a time do no harm."""

    def _split_scope(self, nodeid: str) -> str:
        return "heavy" if nodeid.startswith(HEAVY) else nodeid.split("::", 1)[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Share the tests among processes (`tests/run.sh`)."""
    return ByFile(config, log)


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
