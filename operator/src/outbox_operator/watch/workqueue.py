"""A keyed work queue: one reconcile per key at a time, few at once over all, later ones merged, failures backed off.

What watches and reports tell only puts keys in here.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_BACKOFF: Final = 0.5
LONGEST_BACKOFF: Final = 60.0
JITTER: Final = 0.1

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a resource."""


class KeyedQueue:
    """Calls `work(key)` for every key that is due.

    `work` answers in how many seconds it wants to be called again if no `add` asks for it before, or None for never.
    """

    def __init__(self, work: Callable[[Key], Awaitable[float | None]], *, workers: int = 8) -> None:
        """Start with an empty queue; `run` does the work."""
        self._work = work
        self._workers = workers
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._order = itertools.count()
        self._changed = asyncio.Event()
        self._moved = time.monotonic()
        """When work ended last, or no key was due."""

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Ask for the key to be worked on in `delay` seconds, or sooner if that was asked before."""
        when = time.monotonic() + delay
        if key in self._due and self._due[key] <= when:
            return
        self._due[key] = when
        heapq.heappush(self._heap, (when, next(self._order), key))
        self._changed.set()

    def forget(self, key: Key) -> None:
        """Drop the key."""
        self._due.pop(key, None)
        self._failures.pop(key, None)

    @property
    def depth(self) -> int:
        """How many keys are due and wait."""
        now = time.monotonic()
        return sum(when <= now for when in self._due.values())

    @property
    def stuck_seconds(self) -> float:
        """For how long keys have been due and none was worked off."""
        now = time.monotonic()
        due = [when for when in self._due.values() if when <= now]
        return now - max(self._moved, min(due)) if due else 0.0

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(self._loop())

    async def _loop(self) -> None:
        while True:
            key = await self._next()
            self._busy.add(key)
            try:
                again = await self._work(key)
                self._failures.pop(key, None)
            except Exception as err:  # noqa: BLE001 - what one resource causes must not stop the others
                again = self._back_off(key, err)
            finally:
                self._busy.discard(key)
                self._moved = time.monotonic()
                self._changed.set()
            if again is not None:
                self.add(key, again * (1 + random.uniform(0, JITTER)))  # noqa: S311 - spreads load, no secret

    def _back_off(self, key: Key, err: Exception) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        wait = min(FIRST_BACKOFF * (1 << min(failures - 1, 10)), LONGEST_BACKOFF)
        known = isinstance(err, (OSError, TimeoutError)) or type(err).__name__ == "KubeError"
        details = {"namespace": key[0], "processor": key[1], "error": f"{type(err).__name__}: {err}", "again_in": wait}
        log.warning("reconcile failed", extra=details, exc_info=None if known else err)
        return wait

    async def _next(self) -> Key:
        while True:
            self._changed.clear()
            now = time.monotonic()
            skipped: list[tuple[float, int, Key]] = []
            found: Key | None = None
            while self._heap and self._heap[0][0] <= now and found is None:
                entry = heapq.heappop(self._heap)
                when, _, key = entry
                if self._due.get(key) != when:
                    continue
                if key in self._busy:
                    skipped.append(entry)
                    continue
                found = key
                del self._due[key]
            # A busy key waits for its own work, which says when it is done; the first of the others for its time.
            next_due = self._heap[0][0] if self._heap else None
            for entry in skipped:
                heapq.heappush(self._heap, entry)
            if found is not None:
                return found
            self._moved = time.monotonic()
            await self._wait(None if next_due is None else max(next_due - now, 0.001))

    async def _wait(self, seconds: float | None) -> None:
        """Wait for a change, or until `seconds` are over."""
        # Not wait_for: before Python 3.12 it loses a cancellation that comes with a change, and this loop goes on.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
