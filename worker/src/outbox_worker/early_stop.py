"""Lets a process that is told to stop while it still imports end at once; it imports next to nothing itself."""

from __future__ import annotations

import os
import signal


def end_when_told() -> None:
    """End at SIGTERM, until `Shutdown` takes the signal.

    In a container this is process 1, and for that the kernel ignores a signal without a handler (pid_namespaces(7)):
    the pod would go on starting, and stay until its grace period is over. The exit code is that of a process which the
    signal ended, not 0: nothing was done, and a Job must not take it for done.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
