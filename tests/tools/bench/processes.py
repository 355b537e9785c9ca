"""Processes of a benchmark: how they are started, paused and ended, and what /proc says of them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TICKS = os.sysconf("SC_CLK_TCK")


def cpu_of_tree(pid: int) -> float:
    """Return the CPU seconds of a process and all below it; children that ended count with their parent."""
    return sum(_cpu(fields) for _, fields in _read_tree(pid))


def start(command: Sequence[str], log: Path, *, env: dict[str, str] | None = None, cwd: Path | None = None) -> Program:
    """Start a program whose output goes to a file; it ends with this process."""
    with log.open("ab") as out:
        return Program(
            subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", *command],
                stdout=out, stderr=subprocess.STDOUT, cwd=cwd, env=os.environ | (env or {}),
            ),
            log,
        )  # fmt: skip


class Program:
    """One process of a peer."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def check(self) -> None:
        """Fail with the end of its log if it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.returncode}:\n{self.log()[-3000:]}")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """End it, by force if it does not end by itself."""
        if self._process.poll() is not None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to each process that is still there, and to all below it."""
    for root in pids:
        for pid in [pid for pid, _ in _read_tree(root)]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def _read_tree(root: int) -> Iterator[tuple[int, list[str]]]:
    """Return the processes from this one on, each with its fields of /proc; a parent comes before its children."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    stats: dict[int, list[str]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _read_stat(int(entry.name))):
            stats[int(entry.name)] = fields
            children[int(fields[1])].append(int(entry.name))
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        waiting += children[pid]
        if pid in stats:
            yield pid, stats[pid]


def _read_stat(pid: int) -> list[str]:
    """Return the fields after the program's name, which may hold spaces: state, parent, ..."""
    with suppress(OSError), Path(f"/proc/{pid}/stat").open() as stat:
        return _after_name(stat)
    return []


def _after_name(stat: IO[Any]) -> list[str]:
    return str(stat.read()).rpartition(")")[2].split()


def _cpu(fields: list[str]) -> float:
    """Own time and that of children that were waited for."""
    return sum(int(value) for value in fields[11:15]) / _TICKS
