"""How a command can end other than well, and the exit status of each."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

INSTALL: Final = "pip install '.[cli]' in a clone of outbox-operator"
"""Brings the command line and all that it can need."""


class Exit(IntEnum):
    """Exit statuses; docs/cli.md lists them for scripts."""

    DONE = 0
    FAILED = 1
    """Could not be done: database or cluster not reached, right missing, schema missing … Why is on stderr."""
    USAGE = 2
    """The command line makes no sense."""
    REFUSED = 3
    """Understood and not done, nothing was changed: an owner is live, the pair is another by now, you said no …"""
    FOUND = 4
    """Only with --check: there is something that wants attention."""
    INTERRUPTED = 130
    """Ctrl-C."""


class CommandError(Exception):
    """Ends a command; any function of this package may raise it, and the message says what to do."""

    status = Exit.FAILED


class AwayError(CommandError):
    """The API server is not there at this moment; asked again it may be."""


class UsageError(CommandError):
    """The command line lacks something that only shows when it is put together."""

    status = Exit.USAGE


class RefusedError(CommandError):
    """Nothing was changed."""

    status = Exit.REFUSED
