"""The command line's grammar: every command with its options, and which function runs it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox_cli import running
from outbox_cli.cluster import resources
from outbox_cli.console import Format
from outbox_cli.database import claims, conflicts, failures, inspect, migrate, pruning, rebuild, repair, reposition
from outbox_cli.database.moves import Direction
from outbox_core.plain import natural_number, number_each_second, number_of_seconds, port_number, whole_number
from outbox_core.progress.checkpoint import Checkpoint, parse_checkpoint
from outbox_core.spec.base import parse_duration
from outbox_worker.postgres.admin.repair import PAGES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_cli.context import Context
    from outbox_cli.errors import Exit


@dataclass(frozen=True, slots=True)
class _Commands:
    """Where commands are added: to the program, or to a group of commands such as `conflicts`."""

    parsers: Any

    def add(
        self, name: str, run: Callable[[Context], Exit | int], *parents: argparse.ArgumentParser, text: str
    ) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = self.parsers.add_parser(
            name, parents=[_OUTPUT, *parents], help=text, description=text, allow_abbrev=False
        )
        made.set_defaults(run=run, verb=name)
        return made

    def group(self, name: str, metavar: str, *, text: str) -> _Commands:
        parser = self.parsers.add_parser(name, help=text, allow_abbrev=False)
        return _Commands(parser.add_subparsers(required=True, metavar=metavar))


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add every command."""
    # What commands ask of each other's options: unsaid where a command does not have it.
    parser.set_defaults(
        processor=None, file=None, yes=False, all_namespaces=False, to_end=False,
        id=None, type=None, error_class=None, error=None, since=None, until=None,
    )  # fmt: skip
    commands = _Commands(parser.add_subparsers(required=True, metavar="COMMAND"))
    _add_inspect(commands)
    _add_conflicts(commands)
    _add_reposition(commands)
    _add_failures(commands)
    _add_rebuild(commands)
    _add_claims(commands)
    _add_cluster(commands)
    _add_migrate(commands)
    _add_repair(commands)
    _add_prune(commands)
    _add_run(commands)
    # `outbox try` has a grammar of its own: `start` runs it without what the other commands import.
    commands.parsers.add_parser("try", help="watch processors work on an embedded PostgreSQL (outbox try --help)")


def either(
    database: Callable[[Context], Exit | int], cluster: Callable[[Context], Exit | int]
) -> Callable[[Context], Exit | int]:
    """Make a command that works on what its options name."""

    def command(context: Context) -> Exit | int:
        return (cluster if context.means_cluster() else database)(context)

    return command


def _add_inspect(commands: _Commands) -> None:
    status = commands.add(
        "status", either(inspect.status, resources.status), _DATABASE, _MANIFEST, _CLUSTER,
        text="who owns each processor, how far it is, what waits for a person",
    )  # fmt: skip
    status.add_argument("processor", nargs="?", help="only this one: processorId, in a cluster the resource's name")
    status.add_argument("-A", "--all-namespaces", action="store_true", help="resources of every namespace")

    lag = commands.add(
        "lag", inspect.lag, _PROCESSOR, _DATABASE, _MANIFEST, text="what waits behind each checkpoint"
    )  # fmt: skip
    lag.add_argument("--cap", type=natural_number, help="count exactly up to so many messages (10000)")
    lag.add_argument("--max-messages", type=natural_number, help="exit status 4 when more wait")
    lag.add_argument("--max-seconds", type=number_of_seconds, help="exit status 4 when the oldest waits longer")

    stall = commands.add("stall", inspect.stall, _DATABASE, _MANIFEST, text="who holds the high-water mark back")
    stall.add_argument("--all", action="store_true", help="every open transaction that has written, the oldest first")
    stall.add_argument("--check", action="store_true", help="exit status 4 when messages wait for an open transaction")

    commands.add("audit", inspect.audit, _PROCESSOR, _LIMIT, _DATABASE, text="the audit log: what users decided")


def _add_conflicts(commands: _Commands) -> None:
    group = commands.group("conflicts", "list|accept", text="refusals that wait for a person")
    listing = group.add(
        "list", conflicts.list_all, _PROCESSOR, _LIMIT, _DATABASE, text="conflicts that wait for a person"
    )  # fmt: skip
    listing.add_argument("--all", action="store_true", help="also decided ones, and refusals that needed no decision")
    listing.add_argument("--check", action="store_true", help="exit status 4 when one is open")
    accepting = group.add(
        "accept", conflicts.accept, _DATABASE, _MANIFEST, _RECORDED, _COUNT,
        text="go on from the pair that is stored now",
    )  # fmt: skip
    accepting.add_argument("conflict", type=natural_number, help="number of the conflict")
    accepting.add_argument("--pair", type=_pair, help="the stored pair that you saw; refused if it is another")


def _add_reposition(commands: _Commands) -> None:
    rewind = commands.add(
        "rewind", either(partial(reposition.move_checkpoint, direction=Direction.BACK), resources.rewind),
        _DATABASE, _MANIFEST, _CLUSTER, _RECORDED, _COUNT, _WAIT, text="go back: messages are handled again",
    )  # fmt: skip
    skip = commands.add(
        "skip-to", partial(reposition.move_checkpoint, direction=Direction.FORWARD),
        _DATABASE, _MANIFEST, _RECORDED, _COUNT, text="go forward: messages are passed over, never handled",
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
    forget = commands.add(
        "forget-source", reposition.forget_source, _DATABASE, _RECORDED,
        text="let a checkpoint count for a source that moved: the next claim writes down what it reads",
    )  # fmt: skip
    forget.add_argument("processor", help="processorId")


def _add_rebuild(commands: _Commands) -> None:
    group = commands.group("rebuild", "status|try", text="projections built anew beside the old ones")
    status = group.add(
        "status", rebuild.status, _DATABASE, _MANIFEST, text="which processor replaces which, and how far it is"
    )  # fmt: skip
    status.add_argument("processor", nargs="?", help="only rebuilds that this one has part in")
    group.add(
        "try", rebuild.try_swap, _DATABASE, _MANIFEST, text="run a manifest's swapStatement and roll it back"
    )  # fmt: skip


def _add_failures(commands: _Commands) -> None:
    group = commands.group("dead-letters", "list|add|drop", text="messages whose attempts ran out")
    listing = group.add(
        "list", failures.list_dead, _PROCESSOR, _LIMIT, _DEAD_LETTERS, _DATABASE, _MANIFEST,
        text="messages that wait for a person",
    )  # fmt: skip
    listing.add_argument("--payload", action="store_true", help="in JSON: the message too")
    listing.add_argument("--check", action="store_true", help="exit status 4 when there is one")
    adding = group.add(
        "add", failures.add, _PROCESSOR, _DATABASE, _MANIFEST, _RECORDED,
        text="the message at which the processor stopped: it goes on without it",
    )  # fmt: skip
    adding.add_argument("--at", type=_pair, required=True, metavar="TRANSACTION_ID:POSITION", help="as status names it")
    adding.add_argument("--partition", type=natural_number, default=0, help="of a partitioned processor")
    dropping = group.add(
        "drop", partial(failures.decide, drop=True), _PROCESSOR, _DEAD_LETTERS, _DATABASE, _MANIFEST, _RECORDED,
        text="never handle them: what waits behind them goes on",
    )  # fmt: skip
    redriving = commands.add(
        "redrive", partial(failures.decide, drop=False), _PROCESSOR, _DEAD_LETTERS, _DATABASE, _MANIFEST, _RECORDED,
        text="have dead letters and stopped messages handled again, in the order of their keys",
    )  # fmt: skip
    for each in (dropping, redriving):
        each.add_argument("--all", action="store_true", help="every one of the processor")
        each.add_argument("--rate", type=number_each_second, metavar="N", help="at most so many in a second")
    holding = commands.group("held", "list", text="messages that wait to be tried again").add(
        "list", failures.list_held, _PROCESSOR, _LIMIT, _MESSAGES, _DATABASE, _MANIFEST,
        text="failing, delayed and stopped messages",
    )  # fmt: skip
    holding.add_argument("--stopped", action="store_true", help="only those that wait for a person")


def _add_claims(commands: _Commands) -> None:
    group = commands.group("claim", "show|release", text="which resource owns a processor")
    group.add("show", claims.show, _PROCESSOR, _DATABASE, text="who holds each claim")
    release = group.add(
        "release", claims.release, _DATABASE, _RECORDED, text="take a claim from a resource that will not give it up"
    )  # fmt: skip
    release.add_argument("processor", help="processorId")
    release.add_argument("--force", action="store_true", help="needed: a claim belongs to its resource")


def _add_cluster(commands: _Commands) -> None:
    pause = commands.add(
        "pause", partial(resources.suspend, suspend=True), _CLUSTER, _WAIT,
        text="suspend a resource: checkpoint and claim are kept",
    )  # fmt: skip
    resume = commands.add(
        "resume", partial(resources.suspend, suspend=False), _CLUSTER, _WAIT, text="let a suspended resource go on"
    )  # fmt: skip
    accept = commands.add(
        "accept", resources.accept, _CLUSTER, _ASKING, _WAIT,
        text="decide a resource's open conflict: go on from the stored pair",
    )  # fmt: skip
    accept.add_argument("--conflict", type=natural_number, help="number of the conflict that you saw")
    for each in (pause, resume, accept):
        each.add_argument("processor", help="the resource's name")


def _add_migrate(commands: _Commands) -> None:
    parser = commands.add("migrate", migrate.migrate, _DATABASE, _DRY_RUN, text="bring the schema to this version")
    parser.add_argument(
        "--phase", choices=["pre", "post", "all"], default="pre", help="post: after the last old worker"
    )
    adopt = commands.add(
        "adopt", migrate.adopt, _DATABASE, _DRY_RUN, text="make an outbox that exists already readable"
    )  # fmt: skip
    adopt.add_argument("--table", required=True, help="schema.name of the table")
    adopt.add_argument("--transaction-id-column", default="transaction_id")
    adopt.add_argument("--position-column", default="position")
    adopt.add_argument("--ordered-by", help="column whose order old rows get; without it they are never read")
    adopt.add_argument("--only-where-null", help="backfill only rows where this column is NULL: processed_on_utc")
    adopt.add_argument("--publication-column", help="column of publications, to be indexed too")
    adopt.add_argument("--batch", type=_at_least_one, default=5_000, help="rows in one transaction of the backfill")
    identity = commands.add(
        "confirm-identity", migrate.confirm_identity, _DATABASE, _DRY_RUN, text="after a copy, a move or a restore"
    )  # fmt: skip
    identity.add_argument("action", choices=["keep", "renew"], help="keep: it moved here. renew: the original lives on")


def _add_repair(commands: _Commands) -> None:
    parser = commands.add(
        "repair", repair.repair, _DATABASE, _MANIFEST, _RECORDED,
        text="rebase transaction ids that a restore brought from a server further on than this one",
    )  # fmt: skip
    parser.add_argument(
        "--table", action="append", default=[], metavar="SCHEMA.TABLE[.COLUMN]",
        help="a further outbox whose processors' checkpoints are in this schema (column: transaction_id)",
    )  # fmt: skip
    parser.add_argument("--pages", type=_at_least_one, default=PAGES, help="pages in one transaction (%(default)s)")


def _add_prune(commands: _Commands) -> None:
    prune = commands.add(
        "prune", pruning.prune, _DATABASE, _MANIFEST, _RECORDED,
        text="delete messages that every registered processor has examined",
    )  # fmt: skip
    prune.add_argument("--source", metavar="SCHEMA.TABLE", help="a mapped table, by the mapping that its readers use")
    prune.add_argument("--older-than", type=_duration, metavar="168h", help="only messages stored longer ago")
    prune.add_argument("--batch", type=_at_least_one, default=1_000, help="messages in one transaction (%(default)s)")
    prune.add_argument("--rate", type=number_each_second, metavar="N", help="at most so many in a second")
    prune.add_argument(
        "--ignore", action="append", default=[], metavar="PROCESSOR",
        help="leave a processor out that will never run again; repeat it for more",
    )  # fmt: skip
    prune.add_argument(
        "--readers", type=Path, action="append", default=[], metavar="DIR",
        help="files of a Secret: a database where projections of these messages keep their checkpoints; repeat it",
    )  # fmt: skip
    prune.add_argument("--no-remote-readers", action="store_true", help="say that there is no such database")


def _add_run(commands: _Commands) -> None:
    run = commands.add("run", running.run, _DATABASE, text="run a processor here, without Kubernetes; Ctrl-C drains")
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


def _option(*names: str, parents: Sequence[argparse.ArgumentParser] = (), **how: Any) -> argparse.ArgumentParser:
    """Make an option that commands share, with others that go with it."""
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False, parents=parents)
    if names:
        parent.add_argument(*names, **how)
    return parent


def _database_options() -> argparse.ArgumentParser:
    parent = _option()
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


def _cluster_options() -> argparse.ArgumentParser:
    parent = _option()
    group = parent.add_argument_group("cluster")
    group.add_argument("-n", "--namespace", help="namespace (that of the context)")
    group.add_argument("--context", help="context of the kubeconfig")
    group.add_argument("--kubeconfig", type=Path, help="file (KUBECONFIG, ~/.kube/config)")
    return parent


# Options that commands share.
_DATABASE = _database_options()
_CLUSTER = _cluster_options()
_OUTPUT = _option("-o", "--output", choices=[each.value for each in Format], default="table", help="(%(default)s)")
_PROCESSOR = _option("processor", nargs="?")
_MANIFEST = _option(
    "-f", "--file", type=Path, action="append", metavar="YAML",
    help="the processor's manifest: its table, columns, publications, message types, schema and id",
)  # fmt: skip
_LIMIT = _option("--limit", type=_at_least_one, default=100, help="no more than so many (%(default)s)")
_COUNT = _option(
    "--count-at-most", type=natural_number, default=1_000_000, metavar="N",
    help="the preview counts exactly up to so many messages (%(default)s)",
)  # fmt: skip
_WAIT = _option("--wait", action="store_true", help="in a cluster: until it is done")
_WAIT.add_argument("--timeout", type=number_of_seconds, default=120.0, help="seconds to wait (%(default)s)")
_DRY_RUN = _option("--dry-run", action="store_true", help="say what would be done")
_ASKING = _option("-y", "--yes", action="store_true", help="do not ask", parents=[_DRY_RUN])
_RECORDED = _option("--reason", metavar="TEXT", help="why; kept in the audit log", parents=[_ASKING])
_MESSAGES = _option("--key", action="append", help="messages of this key; repeat it for more")
_MESSAGES.add_argument("--message-id", action="append", help="this message; repeat it for more")
_DEAD_LETTERS = _option(
    "--id", type=natural_number, action="append", help="number of a dead letter; repeat it for more",
    parents=[_MESSAGES],
)  # fmt: skip
_DEAD_LETTERS.add_argument("--type", action="append", help="messages of this type; repeat it for more")
_DEAD_LETTERS.add_argument("--error-class", action="append", metavar="CLASS", help="ValueError, 23505 …; repeat it")
_DEAD_LETTERS.add_argument("--error", metavar="TEXT", help="whose error has this text")
_DEAD_LETTERS.add_argument("--since", type=_time, metavar="RFC3339", help="that died at or after this time")
_DEAD_LETTERS.add_argument("--until", type=_time, metavar="RFC3339", help="that died before this time")
