"""What the demo says while it works: a line for each step with the elapsed time, and a table while messages flow.

On a terminal the table stays at the bottom and is drawn over itself; elsewhere it is printed as plain lines, seldom.
Several threads talk at once, so every write goes through one lock.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

REDRAW_SECONDS: Final = 0.5
PLAIN_SECONDS: Final = 15.0


class Progress:
    """The demo's voice."""

    def __init__(self, out: IO[str] = sys.stdout, *, terminal: bool | None = None, began: float | None = None) -> None:
        """Write to `out`; a terminal gets the moving table. `began` (seconds since 1970) is when it all began."""
        self._out = out
        self._terminal = out.isatty() if terminal is None else terminal
        self._began = time.monotonic() - (time.time() - began if began is not None else 0)
        self._lock = threading.Lock()
        self._table: Sequence[str] = ()
        self.timings: dict[str, float] = {}

    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._began

    def say(self, text: str, who: str = "") -> None:
        """Print one line, above the table."""
        name = f"{who}: " if who else ""
        with self._lock:
            self._erase()
            for line in text.splitlines() or [""]:
                self._out.write(f"[{self.elapsed():6.1f} s] {name}{line}\n")
            self._draw()

    def print_lines(self, lines: Sequence[str]) -> None:
        """Print lines as they are."""
        with self._lock:
            self._erase()
            self._out.writelines(f"{line}\n" for line in lines)
            self._draw()

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Say what begins, and how long it took when it is done."""
        began = time.monotonic()
        self.say(f"{text} …")
        yield
        self.timings[text] = time.monotonic() - began
        self.say(f"{text}: done in {self.timings[text]:.1f} s")

    @contextmanager
    def table(self, make_lines: Callable[[], Sequence[str]]) -> Iterator[None]:
        """Show a table that `make_lines` makes anew, as long as the block runs."""
        finished = threading.Event()
        thread = threading.Thread(target=self._keep_drawing, args=(make_lines, finished), daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()
            with self._lock:
                self._erase()
                self._table = ()

    def _keep_drawing(self, make_lines: Callable[[], Sequence[str]], finished: threading.Event) -> None:
        while not finished.wait(REDRAW_SECONDS if self._terminal else PLAIN_SECONDS):
            try:
                lines = make_lines()
            except Exception as error:  # noqa: BLE001  # a busy API server: the next look may be answered
                lines = [f"(no table this time: {error})"]
            if not self._terminal:
                self.print_lines([f"           {line}" for line in lines])
                continue
            with self._lock:
                self._erase()
                self._table = lines
                self._draw()

    def _erase(self) -> None:
        if self._table:
            self._out.write(f"\x1b[{len(self._table)}F\x1b[J")

    def _draw(self) -> None:
        self._out.writelines(f"{line}\n" for line in self._table)
        self._out.flush()
