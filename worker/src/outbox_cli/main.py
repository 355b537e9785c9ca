"""`outbox`: reads the command line, runs one command, and turns how it ends into an exit status.

As `kubectl outbox` the commands that know both mean the cluster.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

import psycopg
from pydantic import ValidationError

from outbox_cli.commands import add_commands
from outbox_cli.console import Console, Format, printable
from outbox_cli.context import Context
from outbox_cli.errors import CommandError, Exit
from outbox_core import __version__
from outbox_core.errors import OutboxError
from outbox_core.plain import plain_faults
from outbox_sql.adopt import AdoptionError
from outbox_sql.runner import MigrationError
from outbox_worker.postgres.errors import translate

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None, *, plugin: bool = False) -> int:
    """Run one command as `outbox`, or as `kubectl outbox`."""
    options = build_parser(plugin=plugin).parse_args(arguments)
    console = Console(Format(options.output), assume_yes=options.yes)
    try:
        return int(options.run(Context(options, console, os.environ, plugin)))
    except CommandError as err:
        return _fail(str(err), err.status)
    except ValidationError as err:
        return _fail(plain_faults(err.errors()), Exit.USAGE)
    except (psycopg.Error, OutboxError, MigrationError, AdoptionError) as err:
        return _fail(str(translate(err) if isinstance(err, psycopg.Error) else err), Exit.FAILED)
    except KeyboardInterrupt:
        return _fail("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not worth a message, and nothing more can be written.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def build_parser(*, plugin: bool) -> argparse.ArgumentParser:
    """Put the command line together."""
    parser = argparse.ArgumentParser(
        prog="kubectl outbox" if plugin else "outbox",
        description="Look after outbox processors, in a database or in a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"outbox {__version__}")
    add_commands(parser)
    return parser


def _fail(message: str, status: Exit) -> int:
    print(f"outbox: {printable(message)}", file=sys.stderr)  # noqa: T201  # a command line speaks
    return status
