"""Processes of the run that are Python: forked from the run's own process, which has imported what they need.

Each ends with the run, however that ends: the guard ends it, and it watches a pipe that closes with the run's process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from outbox_cli.try_out.guard import SIGNALS, Guard

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outbox_cli.try_out.place import Place


class Children:
    """Makes them."""

    def __init__(self, place: Place, guard: Guard) -> None:
        """Open the pipe that they watch."""
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
