"""Progress of long work on stderr: a bar on a terminal, else a line now and then, so that a log tells it too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

EVERY_SECONDS: Final = 5.0
"""Between two lines where there is no terminal; work that is done sooner prints none."""
_REDRAW_SECONDS: Final = 0.1
_WIDTH: Final = 30


class Progress:
    """How far one piece of work is; with a total, in parts of it."""

    def __init__(
        self, what: str, total: int | None, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show nothing before the first `reach`."""
        self._what = what
        self._total = total
        self._stream = stream
        self._clock = clock
        self._bar = stream.isatty()
        self._due = clock() + (0.0 if self._bar else EVERY_SECONDS)
        self._drawn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal's line empty for what comes next."""
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()

    def reach(self, done: int, of: int | None = None) -> None:
        """Tell how much is done; `of` is a total that is known only now, perhaps estimated."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + (_REDRAW_SECONDS if self._bar else EVERY_SECONDS)
        total = self._total if of is None or of <= 0 else max(of, done)
        line = format_progress(self._what, done, total, bar=self._bar)
        if self._bar:
            self._stream.write("\r" + line.ljust(self._drawn))
            self._drawn = max(self._drawn, len(line))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def format_progress(what: str, done: int, total: int | None, *, bar: bool) -> str:
    """Write the line."""
    if total is None:
        return f"{what}: {done:,} …"
    if not bar:
        return f"{what}: {done:,} of {total:,}"
    filled = _WIDTH if total <= 0 else min(_WIDTH, done * _WIDTH // total)
    return f"{what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done:,}/{total:,}"
