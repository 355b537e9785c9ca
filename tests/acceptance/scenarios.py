"""Runs scenarios side by side: most of their time they wait, and a room of its own keeps each from the others.

A module's tests name their scenarios by decorating functions with `Scenarios.add`; the first test starts all that were
selected, each test then waits for its own.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.acceptance.conftest import Rooms

AT_ONCE = 4


class Scenarios:
    """A module's scenarios by name."""

    def __init__(self) -> None:
        self._known: dict[str, Callable[[Rooms], None]] = {}
        self._running: dict[str, Future[None]] = {}

    def add(self, scenario: Callable[[Rooms], None]) -> Callable[[Rooms], None]:
        """Register a scenario under its name as a sentence."""
        self._known[scenario.__name__] = scenario
        return scenario

    @property
    def names(self) -> list[str]:
        return list(self._known)

    def start(self, names: Iterable[str], rooms: Rooms) -> None:
        """Start scenarios, a few at once, in order."""
        pool = ThreadPoolExecutor(AT_ONCE)
        self._running = {name: pool.submit(self._known[name], rooms) for name in names}
        pool.shutdown(wait=False)

    def finish(self, name: str, within: float) -> None:
        """Wait for one; raises what it raised."""
        self._running[name].result(timeout=within)
