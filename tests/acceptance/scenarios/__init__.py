"""Runs scenarios side by side: most of their time they wait, and a room of its own keeps each from the others.

Each file here has a subject and names its scenarios by decorating functions with `Scenarios.add`, or with
`Scenarios.add_at_night` what `make test` shows in another way; so do the test files beside this folder that have
`scenarios`. The fixture `running` starts all that were selected, of all those files: each
`test_scenario` then waits for its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.chart.chart import tool
from tests.support.kubernetes.cluster import kubeconfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from _pytest.mark import ParameterSet

    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.room import Resource, Room
    from tests.support.kubernetes.shop import Shop

AT_ONCE = 4
PROGRAMS = Path(sys.executable).parent
"""Where `outbox` is, and the plugin as kubectl looks for it."""


class Scenarios:
    """Scenarios by name."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[[Rooms], None]] = {}
        self._nightly: set[str] = set()

    @classmethod
    def of(cls, *parts: Scenarios) -> Scenarios:
        """Put the scenarios of several files together."""
        found = cls()
        for part in parts:
            assert not found._known.keys() & part._known.keys(), "two scenarios of one name"
            found._known |= part._known
            found._nightly |= part._nightly
        return found

    def add(self, scenario: Callable[[Rooms], None]) -> Callable[[Rooms], None]:
        """Register a scenario under its name as a sentence."""
        self._known[scenario.__name__] = scenario
        return scenario

    def add_at_night(self, scenario: Callable[[Rooms], None]) -> Callable[[Rooms], None]:
        """Register one that only `make test-all` runs."""
        self._nightly.add(scenario.__name__)
        return self.add(scenario)

    @property
    def names(self) -> list[ParameterSet]:
        """The names as parameters of a test."""
        marks = {name: [pytest.mark.nightly] if name in self._nightly else [] for name in self._known}
        return [pytest.param(name, marks=marks[name]) for name in self._known]

    def named(self, name: str) -> Callable[[Rooms], None]:
        return self._known[name]


class Running:
    """Scenarios that were started, a few at once, in the order of their tests."""

    def __init__(self, scenarios: Mapping[str, Callable[[Rooms], None]], rooms: Rooms) -> None:
        rooms.server.prepare(len(scenarios))
        pool = ThreadPoolExecutor(AT_ONCE)
        self._futures = {name: pool.submit(scenario, rooms) for name, scenario in scenarios.items()}
        pool.shutdown(wait=False)

    def finish(self, name: str, within: float) -> bool:
        """Wait for one; raises what it raised. True: it came to its end, with all that it asserts."""
        running = self._futures[name]
        running.result(timeout=within)
        return running.done() and not running.cancelled()


def find_selected(session: pytest.Session) -> dict[str, Callable[[Rooms], None]]:
    """Find the scenarios whose `test_scenario` was selected, in any file."""
    found: dict[str, Callable[[Rooms], None]] = {}
    for item in session.items:
        if isinstance(item, pytest.Function) and item.originalname == "test_scenario":
            name = str(item.callspec.params["name"])
            assert name not in found, f"two scenarios are named {name}"
            found[name] = item.module.scenarios.named(name)
    return found


def until_handled(room: Room, resource: Resource, count: int, within: float = 120) -> None:
    """Wait for so many effects since the room was made: there must not be more."""
    resource.until(f"{count} messages are handled", lambda: len(room.handled()) >= count, within)
    assert len(room.handled()) == count


def until_owner(resource: Resource, within: float = 120) -> None:
    resource.until_condition("OwnershipGranted", "True", within=within)


def block(room: Room, orders: Resource, change: int) -> dict[str, Any]:
    """Edit the checkpoint row behind the owner's back, after five messages; answer the open conflict."""
    orders.until_ready()
    room.shop.produce(5)
    until_handled(room, orders, 5)
    room.shop.query(
        "UPDATE outbox.processor_checkpoints SET last_processed_position = last_processed_position + %s", change
    )
    room.shop.produce(1)
    said = orders.until_condition("CheckpointHealthy", "False")
    opened: dict[str, Any] = orders.status["conflicts"]["open"]
    assert opened["expected"] in said["message"]
    assert opened["stored"] in said["message"]
    return opened


def recovers(room: Room, orders: Resource, count: int = 1, *, processors: int = 1) -> None:
    """Ready again, it handles new messages; so does every other processor of the room, each by itself."""
    orders.until_ready(within=150)
    room.shop.produce(count)
    until_handled(room, orders, count * processors)


def run_outbox(shop: Shop, *command: str) -> str:
    """Run `outbox …` or `kubectl outbox …` by hand: the database in libpq's environment, nobody to ask."""
    path = os.pathsep.join([str(PROGRAMS), str(tool("kubectl").parent), os.environ["PATH"]])
    done = subprocess.run(
        command,
        env={**os.environ, **shop.libpq, "PATH": path, "KUBECONFIG": str(kubeconfig())},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
