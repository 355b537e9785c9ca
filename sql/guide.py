"""PURE: what a person is told about an outbox that exists already: locks, manifest, grants, change-over.

Used by `outbox adopt`, and by `outbox try --on`, which writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SCAN_BYTES_PER_SECOND: Final = 100_000_000
"""What one read of the table is reckoned with."""
SORTED_PER_SECOND: Final = 1_000_000
NUMBERED_PER_SECOND: Final = 20_000
_LONGEST_NAME: Final = 40
"""Of a resource's 52 characters; the rest is for `-trial`."""
_PLAIN: Final = re.compile("[a-z][a-z0-9]*(_[a-z0-9]+)*")
_RESERVED_END: Final = re.compile("_(trial|[0-9a-f]{8})$")
_ORDER: Final = (
    "position", "transactionId", "messageId", "messageType", "data", "publicationId", "partitionKey", "metadata",
    "scheduled", "deliverAfter",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that `outbox adopt` does.

    Attributes:
        what: in words.
        lock: which lock on the table, and what that keeps waiting.
        seconds: about how long, without waiting for locks.

    """

    what: str
    lock: str
    seconds: float

    @override
    def __str__(self) -> str:
        """Write it in one line."""
        return f"{self.what}: {self.lock}; about {format_seconds(self.seconds)}"


def format_seconds(seconds: float) -> str:
    """Write a duration that is only reckoned."""
    if seconds < 1:
        return "1 s or less"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def build_steps(
    *,
    columns: Mapping[str, str],
    indexes: Iterable[Sequence[str]],
    rows: int,
    size: int,
    backfills: bool,
    lock_timeout: str,
) -> list[Step]:
    """Say what adopting does, in its order.

    Args:
        columns: to be added, with their types.
        indexes: the columns of each index to be built.
        rows: about so many.
        size: of the table in bytes.
        backfills: rows that are there already are numbered.
        lock_timeout: how long the command waits for the lock before it lets producers go on and tries again.

    """
    steps = []
    if columns:
        steps.append(
            Step(
                f"add {' and '.join(columns)} (the catalog is changed, no row is rewritten)",
                "ACCESS EXCLUSIVE for some milliseconds; it waits for open transactions on the table, at most "
                f"{lock_timeout} at a time, and inserts wait behind it for as long",
                0.1,
            )
        )
    if backfills:
        steps.append(
            Step(
                "number the rows that are there, in short transactions",
                "ROW EXCLUSIVE; inserts go on",
                rows / NUMBERED_PER_SECOND,
            )
        )
    steps += [
        Step(
            f"build an index on ({', '.join(index)}), CONCURRENTLY",
            "SHARE UPDATE EXCLUSIVE; inserts go on; it waits for transactions that are open when it begins",
            2 * size / SCAN_BYTES_PER_SECOND + rows / SORTED_PER_SECOND,
        )
        for index in indexes
    ]
    return steps


def name_of(schema: str, table: str) -> str:
    """Name the processor of a table as a resource may be called: lower-case letters, digits, dashes, a letter first.

    No two tables have one name: with it, the second table's processor would begin where the first one's had come to,
    and take its resource's place. A hash tells apart what a resource's name cannot say, and what reads as another
    table's trial or hash.
    """
    parts = [table] if schema == "public" else [schema, table]
    name = "--".join(part.replace("_", "-") for part in parts)
    if len(name) <= _LONGEST_NAME and all(map(_PLAIN.fullmatch, parts)) and not _RESERVED_END.search(table):
        return name
    digest = hashlib.sha256(json.dumps([schema, table]).encode()).hexdigest()[:8]
    readable = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")
    readable = readable if readable[:1].isalpha() else f"outbox-{readable}"
    return f"{readable[: _LONGEST_NAME - 9].rstrip('-')}-{digest}"


def trial_of(schema: str, table: str) -> str:
    """Name the processor that only tries a table's messages."""
    return f"{name_of(schema, table)}-trial"


def build_index(schema: str, table: str, columns: Iterable[str], *, partitioned: bool = False) -> str:
    """Write the statement for an index. PostgreSQL builds none of a partitioned table CONCURRENTLY."""
    how = "" if partitioned else "CONCURRENTLY "
    return f"CREATE INDEX {how}ON {quote(schema)}.{quote(table)} ({', '.join(map(quote, columns))})"


def build_table(schema: str, table: str, columns: Mapping[str, str]) -> str:
    """Write `source.table` as YAML; names are quoted where YAML needs it."""
    listed = [f"    {role}: {_scalar(columns[role])}" for role in _ORDER if role in columns]
    lines = ["table:", f"  schemaName: {_scalar(schema)}", f"  name: {_scalar(table)}", "  columns:", *listed]
    return "\n".join("    " + line for line in lines)


def build_manifest(*, schema: str, table: str, columns: Mapping[str, str] | None) -> str:
    """Write a whole `OutboxProcessor` that tries the table; `columns` None: our own table, which needs no mapping.

    Its name is its processorId, and no target that it has later gets what it handled with the target log. So it has a
    name of its own, and the change-over says how the real one is called.
    """
    mapping = [] if columns is None else [build_table(schema, table, columns)]
    if columns is None and schema != "outbox":
        mapping = [f"    schemaName: {_scalar(schema)}"]
    return "\n".join(
        [
            "apiVersion: outbox-operator.dev/v1alpha1",
            "kind: OutboxProcessor",
            f"metadata: {{name: {trial_of(schema, table)}}}",
            "spec:",
            "  source:",
            "    connection: {secretRef: {name: orders-db}}  # a Secret with the key uri, or host, user, password …",
            "    cursor: Snapshot",
            *mapping,
            "  startFrom: {type: Beginning}",
            "  target: {log: {}}  # the real one has another name, and sql, python, rabbitmq, kafka or http",
        ]
    )


def build_grants(schema: str, table: str, role: str = "processor", functions: str = "outbox") -> list[str]:
    """Return the statements that let a processor's role read the table and use our functions, but not decide.

    Producers need none: the position's sequence is granted to all. Those about our schema are those of sql/README.md.
    """
    ours, theirs, reader = quote(functions), quote(schema), quote(role)
    deciding = ", ".join(
        f"{ours}.{function}"
        for function in (
            "redrive_dead_letters(text, int, bigint[], text, text)",
            "drop_dead_letters(text, int, bigint[], text, text)",
            "decide_held_messages(text, int, bigint[], boolean, text, text)",
        )
    )
    return [
        f"GRANT USAGE ON SCHEMA {theirs} TO {reader};",
        f"GRANT SELECT ON {theirs}.{quote(table)} TO {reader};",
        f"GRANT USAGE ON SCHEMA {ours} TO {reader};",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {ours} TO {reader};",
        f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {ours} TO {reader};",
        f"REVOKE EXECUTE ON FUNCTION {ours}.confirm_identity(text, text) FROM {reader};",
        f"REVOKE EXECUTE ON FUNCTION {deciding} FROM {reader};",
    ]


def describe_change_over(
    schema: str,
    table: str,
    *,
    transaction_id: str = "transaction_id",
    poller: str = "the old poller",
    handled: str | None = None,
    backfilled: bool = False,
    note: str = "",
) -> list[str]:
    """Say, step by step, how to go over from what handles the rows today, with nothing lost and nothing twice.

    Args:
        schema: of the table.
        table: its name.
        transaction_id: column of the pair.
        poller: what handles the rows today.
        handled: SQL condition that is true once the poller has handled the row; None: the table does not say.
        backfilled: rows that were there before the pair's columns have a pair.
        note: what a person must know first.

    """
    name, pair, trial = f"{quote(schema)}.{quote(table)}", quote(transaction_id), trial_of(schema, table)
    done = handled or "<it is handled>"
    steps = [note] if note else []
    steps.append("producers and their transactions stay as they are; this command may run beside them")
    steps.append(
        f"try it beside {poller}, with the manifest as it is (`outbox run -f`, or kubectl apply -f): its target log "
        f"has no effects. {trial} is then the processorId that has handled these messages, and it never handles them "
        "again, whatever its target. End it (Ctrl-C, or kubectl delete), and leave it out of prunes "
        f"(`outbox prune --ignore {trial}`)"
    )
    if not backfilled:
        count = f"SELECT count(*) FROM {name} WHERE {pair} IS NULL AND NOT ({done});"  # noqa: S608
        steps.append(
            f"let {poller} handle the rows that were there before the columns: they have no pair, and no processor "
            f"reads them. Go on once this is 0: {count}"
        )
    steps.append(f"stop {poller}, and wait until its last process has ended")
    update = f"UPDATE {name} SET {pair} = NULL WHERE {done} AND {pair} IS NOT NULL;"  # noqa: S608
    if handled is None:
        steps.append(
            "rows that it has handled and left behind have to go, or they come again: DELETE them, or take their pair "
            f"from them: {update}"
        )
    else:
        steps.append(f"take the pair from what it has handled, and it is never read: {update}")
    steps.append(
        f"in the manifest write name: {name_of(schema, table)} and the target that you want, and apply it (kubectl "
        "apply -f): it begins at the beginning and handles all that waits"
    )
    steps.append(
        f"the way back: suspend the resource before {poller} starts again; it does not know what was handled meanwhile"
    )
    return steps


def quote(name: str) -> str:
    """Write an SQL identifier."""
    plain = name.isidentifier() and name == name.lower() and name.isascii()
    return name if plain and not _RESERVED.fullmatch(name) else '"' + name.replace('"', '""') + '"'


_RESERVED: Final = re.compile(
    "all|analyse|analyze|and|any|array|as|asc|asymmetric|authorization|binary|both|case|cast|check|collate|collation|"
    "column|concurrently|constraint|create|cross|current_catalog|current_date|current_role|current_schema|"
    "current_time|current_timestamp|current_user|default|deferrable|desc|distinct|do|else|end|except|false|fetch|for|"
    "foreign|freeze|from|full|grant|group|having|ilike|in|initially|inner|intersect|into|is|isnull|join|lateral|"
    "leading|left|like|limit|localtime|localtimestamp|natural|not|notnull|null|offset|on|only|or|order|outer|"
    "overlaps|placing|primary|references|returning|right|select|session_user|similar|some|symmetric|system_user|"
    "table|tablesample|then|to|trailing|true|union|unique|user|using|variadic|verbose|when|where|window|with"
)
"""What PostgreSQL 18 takes for no name unless it is quoted: `pg_get_keywords()` of the categories R and T."""


def _scalar(name: str) -> str:
    plain = name.replace("_", "a").replace("-", "a").isalnum() and not name[0].isdigit() and name.isascii()
    return name if plain and name.lower() not in _WORDS else json.dumps(name)


_WORDS: Final = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})
