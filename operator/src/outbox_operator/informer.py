"""One informer for each kind: lists it once, and watches it from there on.

A watch that ends is continued where it was. One that cannot be continued, because the API server has forgotten what
came after, is begun anew with a listing, which also tells what was deleted in between. Now and then the metadata of all
objects is compared with what is known: what a silent watch missed is counted, and the watch is begun anew.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from outbox_operator import metrics
from outbox_operator.kube import KubeError
from outbox_operator.naming import SELECTOR
from outbox_operator.resources import KIND
from outbox_operator.store import METADATA_ONLY, Listing, slim

if TYPE_CHECKING:
    from typing import Protocol

    from outbox_operator.kube import Kube
    from outbox_operator.store import Body, Store

    class Seen(Protocol):
        """Takes what was learned of an object."""

        def __call__(self, body: Body, *, deleted: bool) -> None:
            """Take it."""


GRACE: Final = 5.0
"""How long a watch may take to deliver what a listing has seen."""
FIRST_WAIT: Final = 0.5
LONGEST_WAIT: Final = 15.0
"""Bounds of the wait after a failure, doubled from one to the other."""
STANDS: Final = 1.0
"""A watch that lasts longer was not refused."""
PAUSE: Final = 0.1
"""Before a watch that the API server ended is continued."""
FORGOTTEN: Final = 410
"""The API server's status for a resourceVersion that is too old."""

log = logging.getLogger(__name__)


class Informer:
    """One kind in one namespace (empty: in all)."""

    def __init__(self, kube: Kube, store: Store, kind: str, namespace: str, seen: Seen, check_seconds: float) -> None:
        """Tell `seen` what changes against `store`."""
        self._kube = kube
        self._store = store
        self._kind = kind
        self._namespace = namespace
        self._seen = seen
        self._check_seconds = check_seconds
        self._labels = "" if kind == KIND else SELECTOR
        self._failing_since: float | None = None
        self.failure = ""
        """Why it could not be listed or watched when that was tried last; empty when it could."""
        self.silent = 0
        """Looks in a row that found what the watch had missed."""
        self.listed = asyncio.Event()
        """It was listed once."""

    @property
    def failing_seconds(self) -> float:
        """For how long it could not be listed or watched."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    async def run(self) -> None:
        """List and watch until cancelled."""
        wait = FIRST_WAIT
        while True:
            try:
                await self._follow(await self._list())
            except KubeError as err:
                wait = FIRST_WAIT if self._failing_since is None else min(2 * wait, LONGEST_WAIT)
                self._fail(err)
                await asyncio.sleep(wait * random.uniform(0.8, 1.2))  # noqa: S311 - spreads load, no secret

    async def _list(self) -> int:
        """List everything and bring the store up to it; answer the listing's resourceVersion."""
        only = self._kind in METADATA_ONLY
        bodies, version = await self._kube.list(
            self._kind, self._namespace, labels=self._labels, metadata_only=only, keep=slim
        )
        listing = Listing(self._kind, self._namespace, bodies, version)
        for body in self._store.find_newer(listing):
            self._seen(body, deleted=False)
        for body in self._store.find_gone(listing):
            self._seen(body, deleted=True)
        self.listed.set()
        return version

    async def _follow(self, version: int) -> None:
        """Watch until that cannot be continued, or has missed something."""
        watch = asyncio.create_task(self._watch(str(version)))
        try:
            if not (await asyncio.wait({watch}, timeout=STANDS))[0]:
                self._succeed()
            # Not all kinds at once, and not all processes in step.
            pause = self._check_seconds * random.uniform(0.5, 1)  # noqa: S311
            while not (await asyncio.wait({watch}, timeout=pause))[0]:
                pause = self._check_seconds
                try:
                    if await self._has_missed():
                        return
                except KubeError as err:
                    self._fail(err)
                    pause = min(pause, LONGEST_WAIT)
            watch.result()
        finally:
            watch.cancel()
            with suppress(asyncio.CancelledError, KubeError):
                await watch

    async def _watch(self, version: str) -> None:
        """Watch from a resourceVersion on, over connections that end; return when what came after it is forgotten.

        Raises:
            KubeError: it is refused.

        """
        wait, only = FIRST_WAIT, self._kind in METADATA_ONLY
        while True:
            events = self._kube.watch(self._kind, self._namespace, version, labels=self._labels, metadata_only=only)
            try:
                async for event, body in events:
                    wait = FIRST_WAIT
                    version = body["metadata"]["resourceVersion"]
                    if event != "BOOKMARK":
                        self._seen(slim(body), deleted=event == "DELETED")
                await asyncio.sleep(PAUSE)
            except KubeError as err:
                if err.status == FORGOTTEN:
                    return
                if err.refused:
                    raise
                # A connection that broke, or an API server that is busy or away: from the same version on.
                await asyncio.sleep(wait * random.uniform(0.8, 1.2))  # noqa: S311
                wait = min(2 * wait, LONGEST_WAIT)

    async def _has_missed(self) -> bool:
        """Tell whether the watch has missed changes, and count them."""
        bodies, version = await self._kube.list_metadata(self._kind, self._namespace, labels=self._labels)
        self._succeed()
        listing = Listing(self._kind, self._namespace, bodies, version)
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

    def _succeed(self) -> None:
        self._failing_since, self.failure = None, ""

    def _fail(self, err: KubeError) -> None:
        where = f" in namespace {self._namespace}" if self._namespace else ""
        self.failure = f"cannot list or watch {self._kind}{where}: {err}"
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        metrics.FAILED_ROUNDS.inc()
        log.warning(self.failure)
