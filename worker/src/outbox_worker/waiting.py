"""Waits until files are ready: `select()` takes none with a number above 1,023, and a process may have more."""

from __future__ import annotations

import select
from math import ceil
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable


class _File(Protocol):
    def fileno(self) -> int: ...


def wait_ready(seconds: float, reading: Iterable[int | _File], writing: Iterable[int | _File] = ()) -> bool:
    """Wait so long, or until one of them has something to read, ended, or takes something; return whether one does."""
    poll = select.poll()
    for each in reading:
        poll.register(each, select.POLLIN)
    for each in writing:
        poll.register(each, select.POLLIN | select.POLLOUT)
    return bool(poll.poll(max(0, ceil(seconds * 1000))))
