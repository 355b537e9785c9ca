"""Lists each kind once before anything is decided, and compares it now and then with what Kopf's watches delivered.

Watches deliver what changes (`handlers.py`), and have gaps: Kopf says nothing of what was deleted between two of its
lists, and a watch may fall silent. So the metadata of all objects is compared with what is known; where that differs,
the difference is counted, and the kind is listed anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from outbox_operator import metrics
from outbox_operator.api.naming import SELECTOR
from outbox_operator.api.resources import KIND
from outbox_operator.cluster.kube import Kube, KubeError
from outbox_operator.watch.store import METADATA_ONLY, Body, Listing, Store, slim

if TYPE_CHECKING:
    from collections.abc import Callable

GRACE: Final = 5.0
"""How long a watch may take to deliver what a listing has seen."""
FIRST_CHECK: Final = 20.0
"""Seconds after the first listing in which watches have begun: what was deleted in between is found soon."""
FIRST_WAIT: Final = 0.5
LONGEST_WAIT: Final = 15.0
"""Bounds of the wait after a failure, doubled from one to the other."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Informer:
    """One kind in one namespace (empty: in all); tells what differs from the store, and whether it was deleted."""

    _kube: Kube
    _store: Store
    _kind: str
    _namespace: str
    _seen: Callable[[Body, bool], None]
    _check_seconds: float
    _failing_since: float | None = field(default=None, init=False)
    failure: str = field(default="", init=False)
    """Why it could not be listed when that was tried last; empty when it could."""
    silent: int = field(default=0, init=False)
    """Looks in a row that found what the watch had missed."""
    listed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """It was listed once."""

    @property
    def failing_seconds(self) -> float:
        """For how long it could not be listed."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    async def run(self) -> None:
        """List once, then compare until cancelled."""
        wait = FIRST_WAIT
        while True:
            try:
                if not self.listed.is_set():
                    await self._list()
                    pause = min(FIRST_CHECK, self._check_seconds)
                else:
                    if await self._has_missed():
                        await self._list()
                    pause = self._check_seconds
                self._failing_since, self.failure, wait = None, "", FIRST_WAIT
            except KubeError as err:
                self._fail(err)
                pause, wait = wait, min(2 * wait, LONGEST_WAIT)
            # Not all kinds at once, and not all processes in step.
            await asyncio.sleep(pause * random.uniform(0.5, 1))  # noqa: S311

    async def _list(self) -> None:
        """List everything and bring the store up to it."""
        listing = await self._fetch(metadata_only=self._kind in METADATA_ONLY, keep=slim)
        for body in self._store.find_newer(listing):
            self._seen(body, False)
        for body in self._store.find_gone(listing):
            self._seen(body, True)
        self.listed.set()

    async def _fetch(self, **how: Any) -> Listing:
        labels = "" if self._kind == KIND else SELECTOR
        bodies, version = await self._kube.list(self._kind, self._namespace, labels=labels, **how)
        return Listing(self._kind, self._namespace, bodies, version)

    async def _has_missed(self) -> bool:
        """Tell whether the watch has missed changes, and count them."""
        listing = await self._fetch(metadata_only=True, from_memory=True)
        if self._store.find_newer(listing) or self._store.find_gone(listing):
            await asyncio.sleep(GRACE)
        newer, gone = len(self._store.find_newer(listing)), len(self._store.find_gone(listing))
        if not newer + gone:
            self.silent = 0
            return False
        self.silent += 1
        metrics.MISSED_CHANGES.inc(newer + gone)
        log.warning("a watch missed changes", extra={"kind": self._kind, "changed": newer, "gone": gone})
        return True

    def _fail(self, err: KubeError) -> None:
        where = f" in namespace {self._namespace}" if self._namespace else ""
        self.failure = f"cannot list {self._kind}{where}: {err}"
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        metrics.FAILED_ROUNDS.inc()
        log.warning(self.failure)
