"""What commands share: the connection that each gets, and who acts and why."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING

from outbox_cli.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from outbox_cli.context import Context
    from outbox_cli.errors import Exit
    from outbox_worker.postgres.connection import Connection


def against_database(run: Callable[[Connection, Context], Exit]) -> Callable[[Context], Exit]:
    """Make a command of a function that needs the database."""

    def command(context: Context) -> Exit:
        with context.connect() as connection:
            return run(connection, context)

    return command


def against_source(run: Callable[[Connection, Context], Exit]) -> Callable[[Context], Exit]:
    """Make a command of a function that needs the database of the messages, and no other."""

    def command(context: Context) -> Exit:
        with context.connect_source() as connection:
            return run(connection, context)

    return command


def whoami() -> str:
    """Name the person for the record: user@host; a container's user may have no name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def need_reason(options: argparse.Namespace) -> None:
    """Refuse a decision without a reason; a dry run needs none."""
    if options.reason is None and not options.dry_run:
        raise UsageError("--reason is missing: it is kept in the audit log")
