"""The Spark driver as the demo sees it: its pod, its two processes, and its query checkpoint on the volume."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from tests.tools.demo.place import ANALYTICS
from tests.tools.demo.processes import find_processes, is_alive, root_of, send
from tests.tools.demo.waiting import DemoError, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.demo.scene import Demo

TABLE: Final = "analytics.orders_per_minute"
QUERY_PATH: Final = "var/lib/orders/query"


def find_driver(demo: Demo) -> dict[str, Any]:
    """Return the driver's pod.

    Raises:
        DemoError: there is none.

    """
    pod = next(iter(demo.cluster.pods(ANALYTICS)), None)
    if pod is None:
        raise DemoError(f"{ANALYTICS} has no driver")
    return pod


def kill_driver_processes(pod: dict[str, Any]) -> list[int]:
    """SIGKILL everything that runs in the driver's container; return the pids."""
    pids = sorted({*find_processes(pod, "outbox_spark"), *find_processes(pod, "java")})
    for pid in pids:
        with suppress(DemoError):
            send(pid, signal.SIGKILL)
    wait_for("the driver's processes are gone", lambda: not any(is_alive(pid) for pid in pids), within=10)
    return pids


def newest_batch(pid: int) -> tuple[int, bool]:
    """Return the newest batch that Spark planned, and whether Spark's own log says that it is over."""
    newest: tuple[float, Path] | None = None
    for directory in (root_of(pid) / QUERY_PATH).glob("*/*/query/offsets"):
        stamp = directory.parent.parent.stat().st_mtime
        newest = max(newest or (stamp, directory), (stamp, directory))
    if newest is None:
        raise DemoError("Spark has no query checkpoint")
    offsets = newest[1]
    batch = max((int(file.name) for file in offsets.iterdir() if file.name.isdecimal()), default=-1)
    return batch, (offsets.parent / "commits" / str(batch)).exists()
