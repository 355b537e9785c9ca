"""Which database is this: the one that its rows name, a copy, a restore into a younger server, a promoted standby?

Checkpoints are made of transaction ids, and those belong to one server. Three things are compared before anything is
claimed: the server's system identifier and the database's oid (a copy, a dump, an upgrade has others), the timeline (a
promoted standby and a base backup recovered elsewhere have all else in common), and the ids stored here with the
server's own counter (`is_behind_its_rows` does the last one thoroughly, when a person confirms).

On a new timeline the resources that own processors here go on by themselves: a failover is no reason to wait for a
person, and who pointed a resource here has said what it is. A resource that owns nothing here waits: in a recovered
base backup the claims are the original's, and a resource of the test system holds none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.report import Reason
from outbox_worker.postgres.call import call, fetch_dicts, fetch_one, fetch_row, in_schema, load
from outbox_worker.postgres.reading.table import OutboxTable

if TYPE_CHECKING:
    from collections.abc import Collection

    from outbox_core.report import ResourceRef
    from outbox_core.spec import Source
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey


@dataclass(frozen=True, slots=True)
class Identity:
    """Which database this is.

    Attributes:
        uuid: of the database.
        timeline: that its server is on.
        rebased: how often a repair has rebased its ids.

    """

    uuid: str
    timeline: int
    rebased: int = 0


@dataclass(frozen=True, slots=True)
class Owner:
    """Who asks: a resource that may own the processor here already."""

    processor_id: str
    resource: ResourceRef


def check_identity(
    connection: Connection, source: Source, key: ProcessorKey | None = None, owner: Owner | None = None
) -> Identity:
    """Check that this is the database that the rows were written in, and that its ids are ahead of its rows.

    Args:
        connection: in autocommit.
        source: names the outbox table and the schema.
        key: whose checkpoint must be one that this server has reached.
        owner: may say that a promoted standby is the same outbox, if it owns the processor.

    Raises:
        ConfigurationError: `DatabaseCopied`: the rows came along with a copy or a move. `DatabaseBehind`: the server
            hands out transaction ids below those of its own rows, so that everything stored stays invisible.

    """
    (row,) = fetch_dicts(connection, in_schema("fetch_identity", source.schema_name))
    if row["database_uuid"] is None:
        raise ConfigurationError(
            f"{source.schema_name}.database_identity is empty: run confirm_identity('renew') as the schema's owner",
            reason=Reason.DATABASE_COPIED,
        )
    behind = _find_behind(connection, source, key)
    if (row["system_identifier"], row["database_oid"]) != (row["actual_system"], row["actual_oid"]):
        raise _copied(row, behind=behind is not None)
    if row["timeline_id"] != row["actual_timeline"] and not _adopt(connection, source.schema_name, owner):
        raise ConfigurationError(
            f"this server is on timeline {row['actual_timeline']}, and the rows were written on {row['timeline_id']}: "
            "a promoted standby, or a backup recovered elsewhere. Resources that own processors here go on; this one "
            "owns none. Run `outbox confirm-identity keep` if this server replaces the old one, `renew` if the old one "
            "lives on",
            reason=Reason.DATABASE_COPIED,
        )
    if row["repair_begun_at"] is not None:
        raise ConfigurationError(
            f"a repair of this database was begun at {row['repair_begun_at']:%Y-%m-%d %H:%M:%S%z} and is not finished: "
            "run `outbox repair` again, it goes on where it was",
            reason=Reason.DATABASE_BEHIND,
        )
    if behind is not None:
        raise ConfigurationError(f"{behind}: run `outbox repair` (docs/restoring.md)", reason=Reason.DATABASE_BEHIND)
    return Identity(str(row["database_uuid"]), row["actual_timeline"], row["rebased"])


def refuse_standby(connection: Connection) -> None:
    """Raise TransientError, `DatabaseUnavailable`, on a standby: nothing can be stored there until it is promoted."""
    if fetch_one(connection, "SELECT pg_is_in_recovery()")[0]:
        raise TransientError(
            "this server is a standby: nothing can be stored here until it is promoted",
            reason=Reason.DATABASE_UNAVAILABLE,
        )


def fetch_timeline(connection: Connection, schema: str) -> int:
    """Return the timeline that the server is on."""
    timeline: int = call(connection, schema, "current_timeline")
    return timeline


def fetch_run(connection: Connection, schema: str) -> str:
    """Return which run of the server this is: another one once it recovered from a crash, if only of one backend."""
    return str(call(connection, schema, "server_run"))


def crashed() -> TransientError:
    """Return what to raise where the run is another one than that in which this process learned what it remembers."""
    return TransientError(
        "the server recovered from a crash: what was read before may name transaction ids that are handed out again, "
        "and is read again",
        reason=Reason.DATABASE_UNAVAILABLE,
    )


def fetch_behind(connection: Connection, source: Source) -> tuple[Any, ...] | None:
    """Return the highest transaction id among the rows and the server's next one, if that is not above it."""
    return fetch_row(connection, load("fetch_behind").format(**OutboxTable.of(source).names))


def fetch_checkpoint_ahead(
    connection: Connection, schema: str, units: Collection[tuple[str, int]]
) -> tuple[tuple[str, int], str] | None:
    """Find a checkpoint that must have come with a restore from a server that was further on, and say why.

    `units` are processors, each with a partition; None: of none it must.
    """
    named = {"processor_ids": [each[0] for each in units], "partitions": [each[1] for each in units]}
    found = fetch_row(connection, in_schema("fetch_checkpoint_ahead", schema), named)
    if found is None:
        return None
    processor_id, partition, stored, following, writer = found
    if writer is None:
        return (processor_id, partition), _say_behind(stored, following)
    return (processor_id, partition), (
        f"the checkpoint names transaction id {stored}, above {writer} which stored it: a restore from a server that "
        "was further on. What was stored here since sorts before it, and would be passed over"
    )


def _find_behind(connection: Connection, source: Source, key: ProcessorKey | None) -> str | None:
    if (found := fetch_behind(connection, source)) is not None:
        return _say_behind(*found)
    if key is None:
        return None
    found = fetch_checkpoint_ahead(connection, key.schema, [(key.processor_id, key.partition)])
    return None if found is None else found[1]


def _say_behind(stored: str, following: str) -> str:
    return (
        f"this server is at transaction id {following}, below {stored} which is stored here: a restore into a "
        "younger server. What is stored stays unread, and new messages sort before it"
    )


def _copied(row: dict[str, Any], *, behind: bool) -> ConfigurationError:
    first = "Its ids are behind its own rows too: run `outbox repair` first. Then run" if behind else "Run"
    return ConfigurationError(
        f"this database is not the one that its rows name (server {row['system_identifier']}, database oid "
        f"{row['database_oid']}; here: {row['actual_system']}, {row['actual_oid']}): it was copied, restored or "
        f"moved. {first} `outbox confirm-identity keep` if it replaces the old one, `renew` if the old one lives on",
        reason=Reason.DATABASE_COPIED,
    )


def _adopt(connection: Connection, schema: str, owner: Owner | None) -> bool:
    if owner is None:
        return False
    who = owner.resource
    adopted = call(
        connection, schema, "adopt_timeline", processor_id=owner.processor_id, cluster=who.cluster,
        namespace=who.namespace, name=who.name, uid=who.uid,
    )  # fmt: skip
    return bool(adopted)
