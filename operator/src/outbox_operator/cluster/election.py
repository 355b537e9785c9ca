"""Runs the election on a thread with an event loop and a connection of its own: no other work delays a renewal."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from outbox_operator.cluster.kube import Kube
from outbox_operator.cluster.leader import Leader

if TYPE_CHECKING:
    from collections.abc import Callable

LOST_LEADERSHIP: Final = 3
"""Exit code of a process that lost its Lease."""

log = logging.getLogger(__name__)


def end_process() -> None:
    """End at once: another process may act from now on, so there is not one more write, not even a graceful one."""
    log.error("the Lease is lost; ending")
    os._exit(LOST_LEADERSHIP)


class Election:
    """One process's part in the election, from `acquire` to `end`."""

    def __init__(self, namespace: str, name: str, identity: str, *, lost: Callable[[], None] = end_process) -> None:
        """Take part under a unique identity; `lost` is called on the election's thread."""
        self._place = (namespace, name, identity)
        self._lost = lost
        self._leader: Leader | None = None
        self._acquired: Future[None] = Future()
        self._stop: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name="election", daemon=True)

    @property
    def active(self) -> bool:
        """This process holds the Lease."""
        return self._leader is not None and self._leader.active

    @property
    def informed(self) -> bool:
        """The API server has told who is active."""
        return self._leader is not None and self._leader.informed

    async def acquire(self) -> None:
        """Return when this process is the active one.

        Raises:
            kubernetes.config.ConfigException: there is no way to the API server.

        """
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
        async with Kube() as kube:
            leader = self._leader = Leader(kube, *self._place)
            try:
                await leader.acquire()
                self._acquired.set_result(None)
                try:
                    await leader.keep()
                except Exception:
                    log.exception("the Lease cannot be kept")
                # Before it is given up: another process may act then, and this one does so until it has ended.
                self._lost()
            finally:
                if leader.active:
                    await leader.release()
