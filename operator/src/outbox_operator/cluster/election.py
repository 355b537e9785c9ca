"""Which of several operator processes is active: a Lease that its holder renews.

One process acts at a time. A holder that cannot renew within RENEW_DEADLINE ends itself, before another may take over
after LEASE_SECONDS; so a slow API server never makes two of them. Another's expiry is judged by this process's own
monotonic clock since it last saw the Lease change: clocks of nodes are not compared. This saves work and nothing more:
what protects the database is the claim and the lease in the database.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from outbox_operator.api.naming import build_object
from outbox_operator.cluster.kube import Kube, KubeError, Where

if TYPE_CHECKING:
    from collections.abc import Callable

LEASE_SECONDS: Final = 10
RENEW_DEADLINE: Final = 7.0
PERIOD: Final = 2.0

LOST_LEADERSHIP: Final = 3
"""Exit code of a process that lost its Lease."""

log = logging.getLogger(__name__)


def end_process() -> None:
    """End at once: another process may act from now on, so there is not one more write, not even a graceful one."""
    log.error("the Lease is lost; ending")
    os._exit(LOST_LEADERSHIP)


class Leader:
    """One process's part in the election, on the event loop that it is called on."""

    def __init__(self, kube: Kube, namespace: str, name: str, identity: str) -> None:
        """Take part under a unique identity."""
        self._kube = kube
        self._place = Where("Lease", namespace, name)
        self._identity = identity
        self._seen: tuple[str, float] = ("", time.monotonic())
        self._renewed = 0.0
        self.active = False

    async def acquire(self) -> None:
        """Return when this process is the active one."""
        waiting = False
        while not await self._try():
            if not waiting:
                log.info("another process is active; standing by", extra={"lease": self._place.name})
            waiting = True
            await asyncio.sleep(PERIOD)
        self.active = True
        log.info("active", extra={"identity": self._identity})

    async def keep(self) -> None:
        """Renew until that fails for too long, or another is the holder; then return, and the process must end.

        The deadline cuts off a try that is under way: one that an API server answers late counts as none.
        """
        try:
            while True:
                async with asyncio.timeout(self._renewed + RENEW_DEADLINE - time.monotonic()):
                    await asyncio.sleep(PERIOD)
                    await self._try()
        except TimeoutError:
            self.active = False

    @property
    def informed(self) -> bool:
        """The API server has told who is active: this process, or another whose Lease was read."""
        return self.active or bool(self._seen[0])

    async def release(self) -> None:
        """Give the Lease up, so that another process need not wait for its end."""
        self.active = False
        try:
            lease = await self._kube.get(self._place)
            if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                await self._kube.replace({**lease, "kind": "Lease", "spec": {**lease["spec"], "holderIdentity": ""}})
        except KubeError as err:
            log.warning("the Lease lapses by itself", extra={"error": str(err)})

    async def _try(self) -> bool:
        started = time.monotonic()
        try:
            async with asyncio.timeout(RENEW_DEADLINE / 2):
                lease = await self._kube.get(self._place)
            async with asyncio.timeout(RENEW_DEADLINE / 2):
                if lease is None:
                    if await self._kube.create(self._lease({}, {})) is None:
                        return False
                else:
                    spec = lease.get("spec") or {}
                    if spec.get("holderIdentity") not in ("", None, self._identity) and not self._lapsed(lease):
                        # Of a renewal of ours, if there was one, no time is left.
                        self._renewed = -math.inf
                        return False
                    await self._kube.replace(self._lease(lease["metadata"], spec))
        except (KubeError, TimeoutError) as err:
            log.warning("cannot read or renew the Lease", extra={"error": str(err)})
            return False
        # Counted from before the call: others count from when they see its effect, which is later.
        self._renewed = started
        return True

    def _lapsed(self, lease: dict[str, Any]) -> bool:
        version = lease["metadata"]["resourceVersion"]
        if version != self._seen[0]:
            self._seen = (version, time.monotonic())
        lasts = int(lease["spec"].get("leaseDurationSeconds", LEASE_SECONDS))
        return time.monotonic() - self._seen[1] > lasts

    def _lease(self, metadata: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        same = spec.get("holderIdentity") == self._identity
        renewed = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": spec.get("acquireTime", now) if same else now,
            "renewTime": now,
            "leaseTransitions": spec.get("leaseTransitions", 0) + (0 if same else 1),
        }
        place = {"name": self._place.name, "namespace": self._place.namespace}
        return build_object("Lease", {**metadata, **place}, spec=renewed)


class Election:
    """Runs a `Leader` on a thread with an event loop and a connection of its own: no other work delays a renewal."""

    def __init__(self, namespace: str, name: str, identity: str, *, lost: Callable[[], None] = end_process) -> None:
        """Take part under a unique identity; `lost` is called on the election's thread.

        Raises:
            kubernetes.config.ConfigException: there is no way to the API server.

        """
        self._kube = Kube()
        self.leader = Leader(self._kube, namespace, name, identity)
        self._lost = lost
        self._acquired: Future[None] = Future()
        self._stop: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    async def acquire(self) -> None:
        """Return when this process is the active one."""
        self._thread.start()
        await asyncio.wrap_future(self._acquired)

    async def end(self) -> None:
        """Give the Lease up, if this process holds it."""
        if self._stop is not None:
            with suppress(RuntimeError):  # it has ended by itself
                self._stop()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            asyncio.run(self._take_part())
        except asyncio.CancelledError:
            pass
        except BaseException as err:  # noqa: BLE001 - the one who waits gets it
            if not self._acquired.done():
                self._acquired.set_exception(err)

    async def _take_part(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        if task is not None:
            self._stop = lambda: loop.call_soon_threadsafe(task.cancel)
        async with self._kube:
            try:
                await self.leader.acquire()
                self._acquired.set_result(None)
                try:
                    await self.leader.keep()
                except Exception:
                    log.exception("the Lease cannot be kept")
                # Before it is given up: another process may act then, and this one does so until it has ended.
                self._lost()
            finally:
                if self.leader.active:
                    await self.leader.release()
