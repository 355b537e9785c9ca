"""How many consumers there are: each uses an equal part of the processor's rate."""

from __future__ import annotations

from typing import Final

NOTICED_SECONDS: Final = 3.0
"""Until the others have seen a new consumer: each looks every two seconds, in its heartbeat's thread."""


class ConsumerCount:
    """What the heartbeat last saw; the loop reads it. One attribute is replaced whole, so threads need no lock."""

    def __init__(self) -> None:
        """Begin with one consumer: this one."""
        self._consumers = 1

    def note(self, consumers: int) -> None:
        """Take how many live; this one does, also where none was seen."""
        self._consumers = max(1, consumers)

    @property
    def share(self) -> float:
        """Of the rate, this consumer's."""
        return 1.0 / self._consumers
