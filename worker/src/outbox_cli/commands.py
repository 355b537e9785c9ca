"""The command line's grammar: every command with its options, and which function runs it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox_cli import running
from outbox_cli.cluster import resources
from outbox_cli.command import (
    acting_options,
    cluster_options,
    database_options,
    manifest_options,
    output_options,
    reason_options,
)
from outbox_cli.context import ContextKind, choose_context
from outbox_cli.database import (
    adopting,
    claims,
    conflicts,
    failures,
    inspect,
    migrate,
    pruning,
    rebuild,
    repair,
    reposition,
)
from outbox_core.plain import natural_number, number_each_second, number_of_seconds, port_number, whole_number
from outbox_core.progress.checkpoint import Checkpoint, parse_checkpoint
from outbox_core.spec.base import parse_duration
from outbox_worker.postgres.admin.repair import PAGES

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_cli.command import Context
    from outbox_cli.errors import Exit

COUNT_AT_MOST = 1_000_000
"""Messages that a preview counts exactly."""


@dataclass(frozen=True, slots=True)
class _Grammar:
    """Where commands are added, and the groups of options they share."""

    commands: Any
    output: argparse.ArgumentParser
    database: argparse.ArgumentParser
    manifest: argparse.ArgumentParser
    cluster: argparse.ArgumentParser
    acting: argparse.ArgumentParser
    reason: argparse.ArgumentParser

    def add(
        self,
        name: str,
        run: Callable[[Context], Exit | int],
        *parents: argparse.ArgumentParser,
        text: str,
        commands: Any = None,
    ) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = (commands or self.commands).add_parser(
            name, parents=[self.output, *parents], help=text, description=text, allow_abbrev=False
        )
        made.set_defaults(run=run, verb=name)
        return made


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command."""
    grammar = _Grammar(
        parser.add_subparsers(required=True, metavar="COMMAND"),
        output_options(),
        database_options(),
        manifest_options(),
        cluster_options(),
        acting_options(),
        reason_options(),
    )
    _add_inspect(grammar)
    _add_conflicts(grammar)
    _add_reposition(grammar)
    _add_failures(grammar)
    _add_rebuild(grammar)
    _add_claims(grammar)
    _add_cluster(grammar)
    _add_migrate(grammar)
    _add_repair(grammar)
    _add_prune(grammar)
    _add_run(grammar)
    # `outbox try` has a grammar of its own: `start` runs it without what the other commands import.
    grammar.commands.add_parser("try", help="watch processors work on an embedded PostgreSQL (outbox try --help)")


def either(
    database: Callable[[Context], Exit | int], cluster: Callable[[Context], Exit | int]
) -> Callable[[Context], Exit | int]:
    """Make a command that works on what its options name."""

    def command(context: Context) -> Exit | int:
        place = choose_context(context.options, context.environment, plugin=context.plugin)
        return database(context) if place is ContextKind.DATABASE else cluster(context)

    return command


def _add_inspect(g: _Grammar) -> None:
    status = g.add(
        "status", either(inspect.status, resources.status), g.database, g.manifest, g.cluster,
        text="who owns each processor, how far it is, what waits for a person",
    )  # fmt: skip
    status.add_argument("processor", nargs="?", help="only this one: processorId, in a cluster the resource's name")
    status.add_argument("-A", "--all-namespaces", action="store_true", help="resources of every namespace")

    lag = g.add("lag", inspect.lag, g.database, g.manifest, text="what waits behind each checkpoint")
    lag.add_argument("processor", nargs="?")
    lag.add_argument("--cap", type=natural_number, help="count exactly up to so many messages (10000)")
    lag.add_argument("--max-messages", type=natural_number, help="exit status 4 when more wait")
    lag.add_argument("--max-seconds", type=number_of_seconds, help="exit status 4 when the oldest waits longer")

    stall = g.add("stall", inspect.stall, g.database, g.manifest, text="who holds the high-water mark back")
    stall.add_argument("--all", action="store_true", help="every open transaction that has written, the oldest first")
    stall.add_argument("--check", action="store_true", help="exit status 4 when messages wait for an open transaction")

    audit = g.add("audit", inspect.audit, g.database, text="the audit log: what users decided")
    audit.add_argument("processor", nargs="?")
    audit.add_argument("--limit", type=_at_least_one, default=100, help="the latest so many (%(default)s)")


def _add_conflicts(g: _Grammar) -> None:
    parser = g.commands.add_parser("conflicts", help="refusals that wait for a person", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="list|accept")
    listing = g.add(
        "list", conflicts.list_all, g.database, text="conflicts that wait for a person", commands=commands
    )  # fmt: skip
    listing.add_argument("processor", nargs="?")
    listing.add_argument("--all", action="store_true", help="also decided ones, and refusals that needed no decision")
    listing.add_argument("--limit", type=_at_least_one, default=100, help="the latest so many (%(default)s)")
    listing.add_argument("--check", action="store_true", help="exit status 4 when one is open")
    accepting = g.add(
        "accept", conflicts.accept, g.database, g.manifest, g.acting, g.reason,
        text="go on from the pair that is stored now", commands=commands,
    )  # fmt: skip
    accepting.add_argument("conflict", type=natural_number, help="number of the conflict")
    accepting.add_argument("--pair", type=_pair, help="the stored pair that you saw; refused if it is another")
    _add_count(accepting)


def _add_reposition(g: _Grammar) -> None:
    rewind = g.add(
        "rewind", either(reposition.rewind, resources.rewind), g.database, g.manifest, g.cluster, g.acting, g.reason,
        text="go back: messages are handled again",
    )  # fmt: skip
    skip = g.add(
        "skip-to", reposition.skip_to, g.database, g.manifest, g.acting, g.reason,
        text="go forward: messages are passed over, never handled",
    )  # fmt: skip
    for parser in (rewind, skip):
        parser.add_argument("processor", nargs="?", help="processorId, in a cluster the resource's name")
        parser.add_argument(
            "--partition", type=natural_number, help="only this one; absent: all that the processor has"
        )
        parser.add_argument("--conflict", type=natural_number, help="number of the open conflict that this decides")
        where = parser.add_mutually_exclusive_group(required=True)
        where.add_argument("--to", type=_pair, metavar="TRANSACTION_ID:POSITION", help="the last message not handled")
        where.add_argument("--to-position", type=whole_number, metavar="N", help="handle from the first message >= N")
        where.add_argument("--to-time", type=_time, metavar="RFC3339", help="handle from what was stored at that time")
        if parser is rewind:
            where.add_argument("--to-beginning", action="store_true", help="handle everything again")
        else:
            where.add_argument("--to-end", action="store_true", help="pass over all that can be read now")
        _add_count(parser)
    _add_wait(rewind)
    forget = g.add(
        "forget-source", reposition.forget_source, g.database, g.acting, g.reason,
        text="let a checkpoint count for a source that moved: the next claim writes down what it reads",
    )  # fmt: skip
    forget.add_argument("processor", help="processorId")


def _add_rebuild(g: _Grammar) -> None:
    parser = g.commands.add_parser("rebuild", help="projections built anew beside the old ones", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="status|try")
    status = g.add(
        "status", rebuild.status, g.database, g.manifest, text="which processor replaces which, and how far it is",
        commands=commands,
    )  # fmt: skip
    status.add_argument("processor", nargs="?", help="only rebuilds that this one has part in")
    g.add(
        "try", rebuild.try_swap, g.database, g.manifest, commands=commands,
        text="run a manifest's swapStatement and roll it back",
    )  # fmt: skip


def _add_failures(g: _Grammar) -> None:
    parser = g.commands.add_parser("dead-letters", help="messages whose attempts ran out", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="list|add|drop")
    listing = g.add(
        "list", failures.list_dead, g.database, g.manifest, text="messages that wait for a person", commands=commands
    )  # fmt: skip
    listing.add_argument("--limit", type=_at_least_one, default=100, help="the first so many (%(default)s)")
    listing.add_argument("--payload", action="store_true", help="in JSON: the message too")
    listing.add_argument("--check", action="store_true", help="exit status 4 when there is one")
    adding = g.add(
        "add", failures.add, g.database, g.manifest, g.acting, g.reason, commands=commands,
        text="the message at which the processor stopped: it goes on without it",
    )  # fmt: skip
    adding.add_argument("processor", nargs="?")
    adding.add_argument("--at", type=_pair, required=True, metavar="TRANSACTION_ID:POSITION", help="as status names it")
    adding.add_argument("--partition", type=natural_number, default=0, help="of a partitioned processor")
    dropping = g.add(
        "drop", failures.drop, g.database, g.manifest, g.acting, g.reason,
        text="never handle them: what waits behind them goes on", commands=commands,
    )  # fmt: skip
    redriving = g.add(
        "redrive", failures.redrive, g.database, g.manifest, g.acting, g.reason,
        text="have dead letters and stopped messages handled again, in the order of their keys",
    )  # fmt: skip
    for each in (listing, dropping, redriving):
        _add_which(each)
    for each in (dropping, redriving):
        each.add_argument("--all", action="store_true", help="every one of the processor")
        each.add_argument("--rate", type=number_each_second, metavar="N", help="at most so many in a second")
    held = g.commands.add_parser("held", help="messages that wait to be tried again", allow_abbrev=False)
    holding = g.add(
        "list", failures.list_held, g.database, g.manifest, text="failing, delayed and stopped messages",
        commands=held.add_subparsers(required=True, metavar="list"),
    )  # fmt: skip
    holding.add_argument("processor", nargs="?")
    holding.add_argument("--key", action="append", help="messages of this key; repeat it for more")
    holding.add_argument("--message-id", action="append", help="this message; repeat it for more")
    holding.add_argument("--stopped", action="store_true", help="only those that wait for a person")
    holding.add_argument("--limit", type=_at_least_one, default=100, help="the first so many (%(default)s)")


def _add_which(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("processor", nargs="?")
    parser.add_argument(
        "--id", type=natural_number, action="append", help="number of a dead letter; repeat it for more"
    )
    parser.add_argument("--key", action="append", help="messages of this key; repeat it for more")
    parser.add_argument("--message-id", action="append", help="this message; repeat it for more")
    parser.add_argument("--type", action="append", help="messages of this type; repeat it for more")
    parser.add_argument("--error-class", action="append", metavar="CLASS", help="ValueError, 23505 …; repeat it")
    parser.add_argument("--error", metavar="TEXT", help="whose error has this text")
    parser.add_argument("--since", type=_time, metavar="RFC3339", help="that died at or after this time")
    parser.add_argument("--until", type=_time, metavar="RFC3339", help="that died before this time")


def _add_claims(g: _Grammar) -> None:
    parser = g.commands.add_parser("claim", help="which resource owns a processor", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="show|release")
    show = g.add("show", claims.show, g.database, text="who holds each claim", commands=commands)
    show.add_argument("processor", nargs="?")
    release = g.add(
        "release", claims.release, g.database, g.acting, g.reason,
        text="take a claim from a resource that will not give it up", commands=commands,
    )  # fmt: skip
    release.add_argument("processor", help="processorId")
    release.add_argument("--force", action="store_true", help="needed: a claim belongs to its resource")


def _add_cluster(g: _Grammar) -> None:
    for name, run, text in (
        ("pause", resources.pause, "suspend a resource: checkpoint and claim are kept"),
        ("resume", resources.resume, "let a suspended resource go on"),
    ):
        parser = g.add(name, run, g.cluster, text=text)
        parser.add_argument("processor", help="the resource's name")
        _add_wait(parser)
    accept = g.add(
        "accept", resources.accept, g.cluster, g.acting,
        text="decide a resource's open conflict: go on from the stored pair",
    )  # fmt: skip
    accept.add_argument("processor", help="the resource's name")
    accept.add_argument("--conflict", type=natural_number, help="number of the conflict that you saw")
    _add_wait(accept)


def _add_migrate(g: _Grammar) -> None:
    parser = g.add("migrate", migrate.migrate, g.database, text="bring the schema to this version")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    parser.add_argument(
        "--phase", choices=["pre", "post", "all"], default="pre", help="post: after the last old worker"
    )
    adopt = g.add("adopt", adopting.adopt, g.database, text="make an outbox that exists already readable")
    adopt.add_argument("--dry-run", action="store_true", help="say what would be done")
    adopt.add_argument("--table", required=True, help="schema.name of the table")
    adopt.add_argument("--transaction-id-column", default="transaction_id")
    adopt.add_argument("--position-column", default="position")
    adopt.add_argument("--ordered-by", help="column whose order old rows get; without it they are never read")
    adopt.add_argument("--only-where-null", help="backfill only rows where this column is NULL: processed_on_utc")
    adopt.add_argument("--publication-column", help="column of publications, to be indexed too")
    adopt.add_argument("--batch", type=_at_least_one, default=5_000, help="rows in one transaction of the backfill")
    identity = g.add(
        "confirm-identity", migrate.confirm_identity, g.database, text="after a copy, a move or a restore"
    )  # fmt: skip
    identity.add_argument("--dry-run", action="store_true", help="say what would be done")
    identity.add_argument("action", choices=["keep", "renew"], help="keep: it moved here. renew: the original lives on")


def _add_repair(g: _Grammar) -> None:
    parser = g.add(
        "repair", repair.repair, g.database, g.manifest, g.acting, g.reason,
        text="rebase transaction ids that a restore brought from a server further on than this one",
    )  # fmt: skip
    parser.add_argument(
        "--table", action="append", metavar="SCHEMA.TABLE[.COLUMN]",
        help="a further outbox whose processors' checkpoints are in this schema (column: transaction_id)",
    )  # fmt: skip
    parser.add_argument("--pages", type=_at_least_one, default=PAGES, help="pages in one transaction (%(default)s)")


def _add_prune(g: _Grammar) -> None:
    prune = g.add(
        "prune", pruning.prune, g.database, g.manifest, g.acting, g.reason,
        text="delete messages that every registered processor has examined",
    )  # fmt: skip
    prune.add_argument("--source", metavar="SCHEMA.TABLE", help="a mapped table, by the mapping that its readers use")
    prune.add_argument("--older-than", type=_duration, metavar="168h", help="only messages stored longer ago")
    prune.add_argument("--batch", type=_at_least_one, default=1_000, help="messages in one transaction (%(default)s)")
    prune.add_argument("--rate", type=number_each_second, metavar="N", help="at most so many in a second")
    prune.add_argument(
        "--ignore", action="append", metavar="PROCESSOR",
        help="leave a processor out that will never run again; repeat it for more",
    )  # fmt: skip
    prune.add_argument(
        "--readers", type=Path, action="append", metavar="DIR",
        help="files of a Secret: a database where projections of these messages keep their checkpoints; repeat it",
    )  # fmt: skip
    prune.add_argument("--no-remote-readers", action="store_true", help="say that there is no such database")


def _add_run(g: _Grammar) -> None:
    run = g.add("run", running.run, g.database, text="run a processor here, without Kubernetes; Ctrl-C drains")
    run.add_argument(
        "-f", "--file", type=Path, action="append", required=True, metavar="YAML",
        help="the processor's manifest; repeat it for the ConfigMap of its code, or for others with its worker.shared",
    )  # fmt: skip
    run.add_argument("--handler", type=Path, metavar="DIR", help="folder of the Python files, instead of a ConfigMap")
    run.add_argument("--cluster-id", help="name of this place in claims (local/HOSTNAME)")
    run.add_argument("--port", type=port_number, default=0, help="HTTP port of /status and /metrics; 0: any")
    run.add_argument("--host", default="127.0.0.1", help="address of that port: who reaches it may ask (%(default)s)")


def _at_least_one(text: str) -> int:
    number = natural_number(text)
    if not number:
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def _duration(text: str) -> timedelta:
    try:
        return parse_duration(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _add_count(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--count-at-most", type=natural_number, default=COUNT_AT_MOST, metavar="N",
        help="the preview counts exactly up to so many messages (%(default)s)",
    )  # fmt: skip


def _add_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="in a cluster: until it is done")
    parser.add_argument("--timeout", type=number_of_seconds, default=120.0, help="seconds to wait (%(default)s)")


def _pair(text: str) -> Checkpoint:
    try:
        return parse_checkpoint(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(str(err)) from err


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as err:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 2026-11-21T10:00:00Z") from err
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
