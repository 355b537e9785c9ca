"""Stops a process with SIGSTOP, and knows when it has stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.support.servers.postgres import wait_until


def freeze(pid: int) -> None:
    """Stop a process, and return when all its threads have stopped.

    The signal stops them only once one of them runs. On a busy machine the others do much until then.
    """
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _states(pid) <= {"T", "t", "Z", "X"}, f"process {pid} is stopped")


def _states(pid: int) -> set[str]:
    """Return the states of its threads (`proc(5)`)."""
    found = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            found.add(stat.read_text().rpartition(")")[2].split()[0])
        except (OSError, IndexError):  # the thread ended this moment
            continue
    return found
