"""Processes of this machine, as the kernel sees them: stopped by SIGSTOP for certain, and the memory they have."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal

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


def memory_mb(pid: int, what: Literal["resident", "peak"]) -> float:
    """Return the megabytes (2**20 bytes) that a process has, shared pages included, or had at most; 0: it has ended."""
    name = {"resident": "VmRSS", "peak": "VmHWM"}[what]
    with suppress(OSError):
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0  # of a zombie there is no such line
    return 0.0
