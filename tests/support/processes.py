"""Processes of this machine, as the kernel sees them: stopped by SIGSTOP for certain, their memory, many open files."""

from __future__ import annotations

import os
import re
import resource
import signal
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from tests.support.servers.postgres import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_OF_SELECT: Final = 1024


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


@contextmanager
def many_files() -> Iterator[None]:
    """What is opened in the body has a number that `select()` does not take, however many files a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * _MOST_OF_SELECT), hard))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        number = 0
        while number < _MOST_OF_SELECT:
            number = os.open(os.devnull, os.O_RDONLY)
            stack.callback(os.close, number)
        yield
