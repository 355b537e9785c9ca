"""The processes of a pod, as this machine's kernel sees them: to freeze, thaw and kill them as no pod could itself.

PID 1 of a container cannot be stopped or killed from inside its own pid namespace, and `kubectl delete pod` asks first.
So the demo signals from outside, which works only where the node is this machine.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterator

PROC = Path("/proc")


def find_processes(pod: dict[str, Any], program: str) -> list[int]:
    """Return the pids of the pod's processes whose command line contains `program`, the oldest first."""
    uid = pod["metadata"]["uid"]
    marks = (f"pod{uid}", f"pod{uid.replace('-', '_')}")
    return sorted(
        pid for pid in _pids() if any(mark in _read(pid, "cgroup") for mark in marks) and program in _command_line(pid)
    )


def find_process(pod: dict[str, Any], program: str) -> int:
    """Return the oldest such process.

    Raises:
        DemoError: the pod has none.

    """
    pids = find_processes(pod, program)
    if not pids:
        raise DemoError(f"pod {pod['metadata']['name']} has no process {program} on this machine")
    return pids[0]


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal.

    Raises:
        DemoError: the process is gone.

    """
    try:
        os.kill(pid, number)
    except ProcessLookupError as error:
        raise DemoError(f"process {pid} ended before it got {number.name}") from error


def is_alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    state = _read(pid, "stat").rpartition(")")[2].split()
    return bool(state) and state[0] != "Z"


def root_of(pid: int) -> Path:
    """Return the process's root directory, as seen from here."""
    return PROC / str(pid) / "root"


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in PROC.iterdir() if entry.name.isdecimal())


def _read(pid: int, name: str) -> str:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _command_line(pid: int) -> str:
    return _read(pid, "cmdline").replace("\0", " ")
