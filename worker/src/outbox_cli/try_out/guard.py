"""The run's other processes: those that it forks, and the guard that ends all of them and removes the run's folder.

The guard reads a pipe whose other end only the run's own process has. The pipe closes when that process ends: normally,
by a signal, or by SIGKILL. So there is one way to clean up, and it is always taken. The forked processes watch such a
pipe too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from outbox_cli.try_out.cache import lives

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_cli.try_out.place import Place

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_START, _END, _REMOVE, _KEEP = "+", "-", "r", "k"
_PATIENCE: Final = 8.0
"""Seconds that a process has to end before it is killed."""


@dataclass(slots=True)
class Belongings:
    """What is to go at the end: processes with the signal that ends each, and paths."""

    paths: list[Path]
    running: dict[int, int] = field(default_factory=dict)
    kept: Path | None = None

    def take(self, line: str) -> None:
        """Carry out one line of the pipe."""
        act, number, rest = line.split(" ", 2)
        if act == _START:
            self.running[int(number)] = int(rest)
        elif act == _END:
            self.running.pop(int(number), None)
        elif act == _REMOVE:
            self.paths.append(Path(rest))
        elif act == _KEEP:
            self.kept = Path(rest)

    def end(self) -> None:
        """End the processes, then remove the paths. A server whose data is kept ends gently."""
        gently = {signal.SIGQUIT: signal.SIGINT} if self.kept else {}
        for pid, number in self.running.items():
            _send(pid, gently.get(signal.Signals(number), number))
        deadline = time.monotonic() + _PATIENCE
        while any(lives(pid) for pid in self.running) and time.monotonic() < deadline:
            time.sleep(0.005)
        for pid in self.running:
            _send(pid, signal.SIGKILL)
        for path in self.paths:
            if path != self.kept:
                _remove(path, deadline)


class Guard:
    """The run's side of the guard."""

    def __init__(self, folder: Path) -> None:
        """Start the guard of a folder. Signals must be blocked: the folder must not stay without its guard."""
        self._belongings = Belongings([folder])
        reading, self._writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writing)
            _watch(reading, self._belongings)
        os.close(reading)

    def add(self, pid: int, ending: signal.Signals = signal.SIGKILL) -> None:
        """Name a process that is to end with the run, and how. The process says it too, as the first thing it does."""
        self._say(f"{_START} {pid} {ending.value}")

    def gone(self, pid: int) -> None:
        """Say that a process has ended and was waited for: its number may be another program's soon."""
        self._say(f"{_END} {pid} 0")

    def remove(self, path: Path) -> None:
        """Name something outside the folder that is to go too."""
        self._say(f"{_REMOVE} 0 {path}")

    def keep(self, path: Path) -> None:
        """Leave this path where it is."""
        self._say(f"{_KEEP} 0 {path}")

    def leave(self) -> None:
        """Close the pipe in a forked process: it is to close for good with the run's own process."""
        os.close(self._writing)

    def finish(self) -> None:
        """End everything, and return when it is done."""
        os.close(self._writing)
        with contextlib.suppress(ChildProcessError):
            # Every child is waited for: the guard sees that a process is gone only then.
            while lives(self.pid) and os.waitpid(-1, 0)[0] != self.pid:
                pass
        self._belongings.end()  # nothing is left to do, unless the guard was killed

    def _say(self, line: str) -> None:
        self._belongings.take(line)
        with contextlib.suppress(BrokenPipeError):  # the guard was killed
            os.write(self._writing, f"{line}\n".encode())


def _watch(reading: int, belongings: Belongings) -> NoReturn:
    try:
        os.setsid()  # neither the terminal's Ctrl-C nor its end is for the guard
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        with os.fdopen(reading, encoding="utf-8") as lines:
            for line in lines:
                belongings.take(line.rstrip("\n"))
        belongings.end()
    finally:
        os._exit(0)


def _send(pid: int, number: int) -> None:
    """Signal a process and what it started: each leads a process group, from its first moments on."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(pid, number)
        except ProcessLookupError:
            os.kill(pid, number)  # it was forked this moment, and leads none yet


def _remove(path: Path, deadline: float) -> None:
    """Remove a path whole: a process that is being killed may add a file beside this."""
    while True:
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists() or time.monotonic() > deadline:
            return
        time.sleep(0.005)


class Children:
    """Forks Python processes from the run's own, which has imported what they need; each ends with the run."""

    def __init__(self, place: Place, guard: Guard) -> None:
        self._place = place
        self._guard = guard
        self._watched, self._held = os.pipe()

    def start(self, name: str, work: Callable[[], int | None], ending: signal.Signals = signal.SIGKILL) -> int:
        """Run a function in a process of its own, whose output goes to a log of that name; return the process id."""
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            self._become(name, work, ending)
        self._guard.add(pid, ending)
        return pid

    def wait(self, pid: int) -> int:
        """Wait for a process to end; return its exit status."""
        status = os.waitpid(pid, 0)[1]
        self._guard.gone(pid)
        return os.waitstatus_to_exitcode(status)

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self._place.logs / f"{name}.log"

    def last_line(self, name: str) -> str:
        """Return what a process wrote last; empty where it wrote nothing."""
        with contextlib.suppress(OSError):
            lines = self.log(name).read_text(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def _become(self, name: str, work: Callable[[], int | None], ending: signal.Signals) -> None:
        code = 1
        try:
            os.setsid()  # the terminal's Ctrl-C is for the run's own process only
            self._guard.add(os.getpid(), ending)
            self._guard.leave()
            os.close(self._place.lock)
            out = os.open(self.log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            for descriptor in (1, 2):
                os.dup2(out, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            os.close(self._held)
            threading.Thread(target=self._end_with_the_run, daemon=True).start()
            code = work() or 0
        except BaseException:  # noqa: BLE001  # the process ends here: what it says is all that is left
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _end_with_the_run(self) -> None:
        os.read(self._watched, 1)
        os.kill(os.getpid(), signal.SIGKILL)
