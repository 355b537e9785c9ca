"""Signals: SIGTERM asks the loop to stop, SIGALRM stops a handler that runs too long.

Both only ever wake or interrupt the main thread; nothing is decided here.

A handler is the user's code: it may compute, sleep or wait for a statement. The alarm interrupts all three, because
`Interrupted` is a KeyboardInterrupt: psycopg answers it by cancelling the statement on the server.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from math import inf, isinf
from typing import TYPE_CHECKING, Final, TypeVar

from outbox_core.errors import HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.waiting import wait_ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_Result = TypeVar("_Result")
_RESERVE: Final = 5.0
"""Seconds of the grace period that are kept for rolling back, giving back and saying good-bye."""
_MOMENT: Final = 0.5
"""Of these, for rolling back what was interrupted."""
_LAST: Final = 2.5
"""Of these, for giving back."""
_AGAIN: Final = 1.0
"""Seconds after which an alarm that ended nothing comes once more. Python's own handler runs between two bytecodes, and
a blocking call is interrupted only by a signal that comes while it blocks. One that comes just before, as while this
thread waits for another to take the interpreter's lock, is only noted, and the call blocks as long as it likes."""


class Interrupted(KeyboardInterrupt):
    """The time for a handler is over. Not an Exception, so that `except Exception` in a handler lets it through."""

    def __init__(self, *, draining: bool) -> None:
        super().__init__("asked to stop" if draining else "delivery.timeout is over")
        self.draining = draining

    def as_error(self, what: str, *, detail: str | None = None) -> OutboxError:
        """Say it in the domain's words; `what` ran for too long."""
        if self.draining:
            return TransientError(
                f"{what} was interrupted and its batch is not stored: the worker was asked to stop",
                reason=Reason.DRAINING,
            )
        return HandlerError(
            f"{what} ran longer than delivery.timeout and was stopped; make it faster, raise delivery.timeout, or "
            "lower delivery.batchSize",
            reason=Reason.HANDLER_TIMEOUT,
            detail=detail,
        )


class Waker:
    """Lets signals and other threads end a wait of the main thread. A pipe: safe inside a signal handler."""

    def __init__(self) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)

    def wake(self) -> None:
        """End the wait that is going on, or else the next one."""
        with contextlib.suppress(BlockingIOError):  # full: it will wake
            os.write(self._writing, b"!")

    def wait(self, seconds: float, socket: int | None = None) -> None:
        """Wait so long, or until woken, or until there is something to read from the socket."""
        wait_ready(seconds, [self._reading] if socket is None else [self._reading, socket])
        with contextlib.suppress(BlockingIOError):  # nothing woke us
            os.read(self._reading, 4096)


class Shutdown:
    """What the signals said. Made in the main thread; the handlers run there too."""

    def __init__(self, waker: Waker, grace: float) -> None:
        """Install the handlers; `grace` is the pod's termination grace period in seconds."""
        self._waker = waker
        self._budget = max(grace - _RESERVE, grace / 2)
        self.requested = False
        """SIGTERM or SIGINT came."""
        self._deadline: float | None = None
        self._armed_until: float | None = None
        signal.signal(signal.SIGTERM, self._on_stop)
        signal.signal(signal.SIGINT, self._on_stop)
        signal.signal(signal.SIGALRM, self._on_alarm)

    def limited(self, seconds: float, function: Callable[[], _Result]) -> _Result:
        """Call the function; it may run so long, and no longer than the grace period once the worker is to stop.

        May be called inside itself; with `inf` seconds it leaves a call inside it a moment more, to roll back.

        Not a context manager: an interruption while `__exit__` is being entered would leave the alarm on, and interrupt
        the next statement, such as a COMMIT. Between a call and its `finally` there is no such gap.

        Raises:
            Interrupted: from inside the function.

        """
        outer = self._armed_until
        until = time.monotonic() + seconds
        self._armed_until = until if outer is None else min(until, outer)
        # Most steps have no time of their own; to stop gives one to what goes on (`_on_stop`).
        is_timed = not isinf(self._armed_until)
        try:
            if is_timed or self._deadline is not None:
                self._arm()
            return function()
        finally:
            self._armed_until = outer
            if is_timed or self._deadline is not None:
                self._arm()

    def last(self, function: Callable[[], None]) -> None:
        """Call what is done at the end, in a share of the time that was kept for it.

        Raises:
            Interrupted: from inside the function.

        """
        self._deadline, self.requested = None, False
        self.limited(_LAST, function)

    def _until(self) -> float:
        if self._armed_until is None:
            return inf
        if self._deadline is None:
            return self._armed_until
        return self._deadline + _MOMENT if isinf(self._armed_until) else min(self._armed_until, self._deadline)

    def _arm(self) -> None:
        until = self._until()
        signal.setitimer(signal.ITIMER_REAL, 0 if isinf(until) else max(until - time.monotonic(), 0.001), _AGAIN)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if self._deadline is None:
            self._deadline, self.requested = time.monotonic() + self._budget, True
            self._arm()
        self._waker.wake()

    def _on_alarm(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if self._armed_until is None or time.monotonic() < self._until():
            self._arm()  # meant for a call that ended at this moment
            return
        draining = self._deadline is not None and self._deadline <= self._armed_until
        # If a handler swallows the interruption it is interrupted again; what it undoes has this time.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)
        raise Interrupted(draining=draining)
