"""Fixtures shared by all layers; what they do is in tests/support."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

from tests.support.servers import postgres

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# How long an example takes says how busy the machine is.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


SHARES = {
    "installed": (
        "tests/acceptance/test_processors",
        "tests/acceptance/test_cli",
        "tests/acceptance/test_partitioned",
        "tests/acceptance/integrations/test_scaling",
        "tests/acceptance/test_spark",
        "tests/acceptance/integrations/",
        "tests/chart/test_release",
        "tests/chart/test_server",
        "tests/acceptance/test_crd",
        "tests/acceptance/test_examples",
        "tests/acceptance/test_tenant",
        "tests/keda/",
    ),
    "processes": (
        "tests/acceptance/",
        "tests/chaos/",
    ),
    "spark": ("tests/integration/spark/test_spark_",),
    "kafka": ("tests/integration/worker/kafka/", "tests/integration/worker/targets/test_nulls"),
    "rabbitmq": (
        "tests/integration/worker/targets/test_rabbitmq",
        "tests/integration/worker/targets/test_unroutable",
        "tests/integration/worker/targets/test_run_with_broker",
        "tests/integration/worker/competing/test_competing_failures",
        "tests/integration/worker/test_large_messages",
        "tests/integration/demo/test_parts",
    ),
}
"""Files that need the cluster, chaos, Spark, or a broker: each share is one process's, which runs them in this order
from the first second on.

The first share is about operators that the chart installed, and only it changes the CRD; the second about operators
that run as processes, each for its own test's namespace, and chaos at its end. A broker is started for its share
alone, not in each process. A Spark test starts several JVMs: one test after the other, two cores are enough for
them and for a Spark application on the cluster.
"""
ON_THE_CLUSTER = ("installed", "processes")
WHILE_THE_CLUSTER_IS_USED = 4
"""Processes; more make each test of the cluster slower, and the whole no faster."""
FIRST = (
    *(start for share in SHARES.values() for start in share),
    "tests/unit/",
    "tests/property/",
    "tests/model/",
    "tests/integration/worker/partitioned/test_rebalance",
    "tests/integration/cli/trying/test_try",
    "tests/integration/moving/",
    "tests/integration/copies/",
    "tests/integration/worker/",
)
"""What begins first: a broken decision is told soon, and long files do not end last. The rest follows as collected."""


def rank(item: pytest.Item) -> int:
    """Return the place of a test's file in FIRST."""
    return next((place for place, start in enumerate(FIRST) if item.nodeid.startswith(start)), len(FIRST))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test-all` ask for everything."""
    parser.addoption("--nightly", action="store_true", help="also the tests that only `make test-all` runs")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage among what tests are made of: it stays to the end, and each process looked many times."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For those marked `calm`, read only files that have the word: the others are most of what collecting costs."""
    if config.getoption("markexpr") != "calm" or not collection_path.name.startswith("test_"):
        return None
    return None if "calm" in collection_path.read_text() else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for the night, and put the rest in order."""
    if not config.getoption("nightly"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    items.sort(key=rank)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives a file to one process, or a share: most tests wait, so several at a time do no harm.

    While tests use the cluster four processes keep two cores busy; the others begin when those have ended. Those marked
    `calm` have what waits for pods of the chart's operator as a share, and their files.
    """

    _waits = True

    @override
    def _split_scope(self, nodeid: str) -> str:
        shares = (name for name, starts in SHARES.items() if nodeid.startswith(starts))
        file = nodeid.split("::", 1)[0]
        if self.config.getoption("markexpr") == "calm":
            return file if next(shares, None) != "installed" else "installed"
        return next(shares, file)

    @override
    def schedule(self) -> None:
        super().schedule()
        self._begin_others()

    @override
    def _assign_work_unit(self, node: Any) -> None:
        if not self._waits or node in self.nodes[:WHILE_THE_CLUSTER_IS_USED]:
            super()._assign_work_unit(node)

    @override
    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        self._begin_others()

    def _begin_others(self) -> None:
        units = [self.workqueue, *self.assigned_work.values()]
        if not self._waits or any(False in unit.get(share, {}).values() for unit in units for share in ON_THE_CLUSTER):
            return
        self._waits = False
        # Twice: a process begins a test when it knows the next one.
        for node in 2 * self.nodes[WHILE_THE_CLUSTER_IS_USED:]:
            self._reschedule(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    """Share the tests among processes (`tests/run.sh`)."""
    return ByFile(config, log)


@pytest.fixture(scope="session")
def random_cases(pytestconfig: pytest.Config) -> int:
    """How many cases to draw where each is a call of the API server; each run draws others."""
    return 300 if pytestconfig.getoption("nightly") else 60


@pytest.fixture(scope="session")
def servers() -> Iterator[postgres.Servers]:
    """PostgreSQL servers by version, started when first asked for."""
    running = postgres.Servers(parent=postgres.find_memory())
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


@pytest.fixture(params=postgres.mostly_nightly(*postgres.VERSIONS, postgres.POOLED))
def each_database(servers: postgres.Servers, request: pytest.FixtureRequest) -> Iterator[postgres.Database]:
    """An empty outbox, at night on every version and behind PgBouncer in transaction mode; many tests share the schema.

    A test marked `postgres.EVERYWHERE` runs on all of them by day too.
    """
    with servers.shared(request.param) as emptied:
        yield emptied
