"""A keyed work queue: one reconcile per key at a time, few at once over all, later ones merged, failures backed off.

What watches and reports tell only puts keys in here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final

from outbox_operator.cluster.kube import KubeError

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
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        """Of keys that are not due yet."""
        self._due: dict[Key, float] = {}
        """Keys that are due, in this order, and since when."""
        self._busy: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()
        self._moved = time.monotonic()
        """When work ended last."""

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Ask for the key to be worked on in `delay` seconds, or sooner if that was asked before."""
        when, planned = time.monotonic() + delay, self._timers.get(key)
        if key in self._due or (planned is not None and planned.when() <= when):
            return
        if delay <= 0:
            self._make_due(key)
            return
        if planned is not None:
            planned.cancel()
        self._timers[key] = asyncio.get_running_loop().call_at(when, self._make_due, key)

    def _make_due(self, key: Key) -> None:
        self._stop_timer(key)
        self._due[key] = time.monotonic()
        self._changed.set()

    def _stop_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()

    def forget(self, key: Key) -> None:
        """Drop the key."""
        self._stop_timer(key)
        self._due.pop(key, None)
        self._failures.pop(key, None)

    @property
    def depth(self) -> int:
        """How many keys are due and wait."""
        return len(self._due)

    @property
    def stuck_seconds(self) -> float:
        """For how long keys have been due and none was worked off."""
        first = next(iter(self._due.values()), None)
        return 0.0 if first is None else time.monotonic() - max(self._moved, first)

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
        known = isinstance(err, OSError | TimeoutError | KubeError)
        details = {"namespace": key[0], "processor": key[1], "error": f"{type(err).__name__}: {err}", "again_in": wait}
        log.warning("reconcile failed", extra=details, exc_info=None if known else err)
        return wait

    async def _next(self) -> Key:
        """Take the first key that is due; one that is being worked on waits for the end of that."""
        while True:
            self._changed.clear()
            found = next((key for key in self._due if key not in self._busy), None)
            if found is not None:
                del self._due[found]
                return found
            await self._changed.wait()
