"""What every command is made of: its options, its way to speak, and how it is entered into the command line."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outbox_cli.console import Console, Format
from outbox_cli.context import connect, connect_source, read_subject
from outbox_cli.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_cli.context import Subject
    from outbox_cli.errors import Exit
    from outbox_worker.postgres.connection import Connection


@dataclass(frozen=True, slots=True)
class Context:
    """One call of a command.

    Attributes:
        plugin: called as `kubectl outbox`.

    """

    options: argparse.Namespace
    console: Console
    environment: Mapping[str, str]
    plugin: bool

    @property
    def subject(self) -> Subject:
        """Schema, outbox and processor that a database command is about."""
        return read_subject(self.options)


def against_database(run: Callable[[Connection, Context], Exit]) -> Callable[[Context], Exit]:
    """Make a command of a function that needs the database."""

    def command(context: Context) -> Exit:
        with connect(context.options, context.environment) as connection:
            return run(connection, context)

    return command


def against_source(run: Callable[[Connection, Context], Exit]) -> Callable[[Context], Exit]:
    """Make a command of a function that needs the database of the messages, and no other."""

    def command(context: Context) -> Exit:
        with connect_source(context.options, context.environment) as connection:
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
    """Refuse an act that says no reason; a dry run needs none.

    Raises:
        UsageError: it says none.

    """
    if options.reason is None and not options.dry_run:
        raise UsageError("--reason is missing: it is kept with the act")


def _parent() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(add_help=False, allow_abbrev=False)


def output_options() -> argparse.ArgumentParser:
    """How results are written."""
    parent = _parent()
    parent.add_argument(
        "-o", "--output", choices=[each.value for each in Format], default=Format.TABLE.value, help="(%(default)s)"
    )
    return parent


def database_options() -> argparse.ArgumentParser:
    """Which database; none of these: libpq's environment."""
    parent = _parent()
    group = parent.add_argument_group("database (none of these: PGSERVICE, PGHOST, PGPASSFILE … of the environment)")
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--connection", type=Path, metavar="DIR", help="files of a Secret: uri, or host, port, database, user, password"
    )
    where.add_argument("--connections", type=Path, metavar="DIR", help="the same in DIR/source, as in a worker's pod")
    where.add_argument("--dsn-file", type=Path, metavar="FILE", help="file that holds a connection URI")
    group.add_argument(
        "--target-connection", type=Path, metavar="DIR",
        help="files of the target's Secret: the database of effects and checkpoint, where it is not the source's (run: "
        "the broker or receiver)",
    )  # fmt: skip
    group.add_argument("--schema", help="schema of checkpoints and functions (outbox)")
    return parent


def manifest_options() -> argparse.ArgumentParser:
    """Where the processor's table and filters are said."""
    parent = _parent()
    parent.add_argument(
        "-f", "--file", type=Path, action="append", metavar="YAML",
        help="the processor's manifest: its table, columns, publications, message types, schema and id",
    )  # fmt: skip
    return parent


def cluster_options() -> argparse.ArgumentParser:
    """Which cluster and namespace; as kubectl has them."""
    parent = _parent()
    group = parent.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", help="namespace (that of the context)")
    group.add_argument("--context", help="context of the kubeconfig")
    group.add_argument("--kubeconfig", type=Path, help="file (KUBECONFIG, ~/.kube/config)")
    return parent


def acting_options() -> argparse.ArgumentParser:
    """For commands that change something."""
    parent = _parent()
    parent.add_argument("--dry-run", action="store_true", help="say what would be done")
    parent.add_argument("-y", "--yes", action="store_true", help="do not ask")
    return parent


def reason_options() -> argparse.ArgumentParser:
    """For recorded acts."""
    parent = _parent()
    parent.add_argument("--reason", metavar="TEXT", help="why; kept with the act")
    return parent
