"""How a run can end before its ledger."""

from __future__ import annotations


class TryError(Exception):
    """The run cannot go on; the message says what to do."""


class EndedError(BaseException):
    """A signal asked the run to end at once. Not an Exception: nothing may swallow it."""

    def __init__(self, number: int) -> None:
        """Keep the signal's number."""
        super().__init__(number)
        self.number = number
