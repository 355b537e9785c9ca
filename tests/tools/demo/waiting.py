"""Waiting for something to become true, with a deadline: the demo's only way to wait."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Found = TypeVar("Found")
POLL_SECONDS: Final = 0.2
PATIENCE: Final = float(os.environ.get("OUTBOX_DEMO_PATIENCE", "1"))
"""Every deadline times this, for a machine that is busy with something else; the promises are those at 1."""


class DemoError(Exception):
    """Something is not as the demo promises; the demo ends with status 1."""


def wait_for(
    what: str, look: Callable[[], Found | None], *, within: float, poll: float = POLL_SECONDS
) -> tuple[Found, float]:
    """Look again and again until there is something; return it and the seconds it took.

    Raises:
        DemoError: the time is over.

    """
    began, allowed = time.monotonic(), within * PATIENCE
    while True:
        found = look()
        seconds = time.monotonic() - began
        if found is not None and found is not False:
            return found, seconds
        if seconds > allowed:
            raise DemoError(f"waited {seconds:.1f} s (at most {allowed:.0f}) for this, in vain: {what}")
        time.sleep(poll)
