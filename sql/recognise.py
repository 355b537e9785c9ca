"""PURE: says from the names and types of a table's columns which outbox it is, and how it is mapped.

Used by `outbox adopt`, and by `outbox try --on`, which writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from outbox_sql.guide import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PAYLOADS: Final = ("jsonb", "json", "text", "character varying", "character")
TRANSACTION_ID: Final = "transaction_id"
POSITION: Final = "position"


@dataclass(frozen=True, slots=True)
class Kind:
    """An outbox that is known.

    Attributes:
        name: for programs.
        title: for people.
        signature: columns that tell it from all others, in lower case and without underscores.
        roles: for each field of `source.table.columns` the column that has it, in the same spelling.
        ordered_by: the column whose order rows that are there already get; None: there is none.
        handled_at: null while the old poller has not handled the row.
        handled: a boolean, true once the old poller has handled the row.
        poller: what handles its rows today.
        note: what a person must know before the change-over.
        refusal: why it cannot be read, and what to do instead.

    """

    name: str
    title: str
    signature: frozenset[str]
    roles: Mapping[str, str]
    ordered_by: str | None = None
    handled_at: str | None = None
    handled: str | None = None
    poller: str = "the old poller"
    note: str = ""
    refusal: str = ""


KINDS: Final[tuple[Kind, ...]] = (
    Kind(
        "ours", "this product's own outbox",
        frozenset({"position", "transactionid", "messageid", "messagetype", "data"}),
        {"position": "position", "transactionId": "transactionid", "messageId": "messageid",
         "messageType": "messagetype", "data": "data", "publicationId": "publicationid",
         "partitionKey": "partitionkey", "metadata": "metadata", "scheduled": "scheduled",
         "deliverAfter": "deliverafter"},
    ),
    Kind(
        "masstransit", "MassTransit's transactional outbox (Entity Framework Core)",
        frozenset({"sequencenumber", "outboxid", "messageid", "messagetype", "body", "senttime"}),
        {"messageId": "messageid", "messageType": "messagetype", "data": "body", "metadata": "headers",
         "partitionKey": "conversationid", "scheduled": "senttime"},
        ordered_by="sequencenumber", poller="MassTransit's delivery service (UseBusOutbox)",
        note="MassTransit deletes a row once it has delivered it, so the rows that are there are those that wait. Turn "
        "its delivery service off (DisableDeliveryService) before the change-over.",
    ),
    Kind(
        "nservicebus", "NServiceBus's outbox (SQL persistence)",
        frozenset({"messageid", "dispatched", "dispatchedat", "operations"}),
        {"messageId": "messageid", "data": "operations"},
        handled="dispatched", poller="NServiceBus",
        note="A row is all that one incoming message sends, an array of transport operations, and it has no type. "
        "NServiceBus itself dispatches a row right after it stored it and then empties `Operations`: a row that it was "
        "faster with is read as []. Read it beside NServiceBus to audit or to copy; to deliver its messages, end the "
        "endpoint's own dispatch first.",
    ),
    Kind(
        "wolverine", "Wolverine's outgoing envelopes",
        frozenset({"id", "ownerid", "destination", "deliverby", "body", "messagetype"}),
        {"messageId": "id", "messageType": "messagetype", "data": "body"}, poller="Wolverine's durability agent",
        refusal="its body is a binary envelope (bytea) that only Wolverine reads, and no JSON: have the application "
        "insert what others shall read into `outbox.messages`, in the same transaction",
    ),
    Kind(
        "debezium", "an outbox for Debezium's outbox event router",
        frozenset({"id", "aggregatetype", "aggregateid", "type", "payload"}),
        {"messageId": "id", "messageType": "type", "data": "payload", "partitionKey": "aggregateid",
         "publicationId": "aggregatetype", "scheduled": "timestamp"},
        poller="Debezium's connector",
        note="Where the application deletes a row in the transaction that inserted it, no query ever sees it: end that "
        "first (for Quarkus: quarkus.debezium-outbox.remove-after-insert=false).",
    ),
    Kind(
        "rails-outbox", "the outbox of the gem rails_outbox (active_outbox)",
        frozenset({"id", "identifier", "event", "payload", "aggregate", "aggregateidentifier"}),
        {"messageId": "identifier", "messageType": "event", "data": "payload", "partitionKey": "aggregateidentifier",
         "publicationId": "aggregate", "scheduled": "createdat"},
        ordered_by="id", poller="the program that reads the outbox today",
    ),
    Kind(
        "ruby-event-store", "the outbox of Ruby Event Store",
        frozenset({"id", "splitkey", "format", "payload", "createdat", "enqueuedat"}),
        {"messageId": "id", "messageType": "format", "data": "payload", "partitionKey": "splitkey",
         "scheduled": "createdat"},
        ordered_by="id", handled_at="enqueuedat", poller="res_outbox",
    ),
    Kind(
        "scaled", 'the outbox of "Scaling the Outbox Pattern" (id, type, content, occurred_on_utc, processed_on_utc)',
        frozenset({"id", "type", "content", "occurredonutc", "processedonutc"}),
        {"messageId": "id", "messageType": "type", "data": "content", "scheduled": "occurredonutc"},
        ordered_by="occurredonutc", handled_at="processedonutc", poller="the outbox processor of the article",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recognised:
    """A table that is an outbox of a known kind.

    Attributes:
        columns: fields of `source.table.columns` and the table's own names for them, as far as it has them.
        missing: columns that `outbox adopt` would add, with their types.
        faults: why it cannot be read as it is, each with the remedy; empty where it can, once it is adopted.
        ordered_by, handled_at, handled: as of the kind, in the table's own names.

    """

    kind: Kind
    columns: dict[str, str]
    missing: dict[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    ordered_by: str | None = None
    handled_at: str | None = None
    handled: str | None = None

    @property
    def is_mapped(self) -> bool:
        """It needs `source.table`; False: it is our own."""
        return self.kind.name != "ours"

    @property
    def is_handled(self) -> str | None:
        """The SQL condition for rows that the old poller has handled; None: the table does not say."""
        if self.handled_at is not None:
            return f"{quote(self.handled_at)} IS NOT NULL"
        return None if self.handled is None else quote(self.handled)


def recognise(columns: Mapping[str, str]) -> Recognised | None:
    """Say which outbox a table is.

    Args:
        columns: names and types without modifiers, as `format_type(atttypid, NULL)` says them, but never quoted.

    Returns:
        None where it is none that is known.

    """
    names = {_plain(name): name for name in columns}
    found = next((kind for kind in KINDS if kind.signature <= names.keys()), None)
    if found is None:
        return None
    mapped = {role: names[plain] for role, plain in found.roles.items() if plain in names}
    if "scheduled" in mapped and columns[mapped["scheduled"]] != "timestamp with time zone":
        del mapped["scheduled"]
    missing = missing_columns(columns, mapped)
    if "messageType" not in mapped and "message_type" not in columns:
        missing["message_type"] = "text"
    mapped = {"position": POSITION, "transactionId": TRANSACTION_ID, "messageType": "message_type"} | mapped
    return Recognised(
        found, mapped, missing, _find_faults(found, columns, mapped),
        names.get(found.ordered_by or ""), names.get(found.handled_at or ""), names.get(found.handled or ""),
    )  # fmt: skip


def guess_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """Map a table that is no known outbox, as far as its columns have usual names; a person has to say the rest."""
    names = {_plain(name): name for name in columns}
    found: dict[str, str] = {}
    for role, usual in _USUAL.items():
        name = next((names[plain] for plain in usual if plain in names), None)
        if name is None or (role == "scheduled" and columns[name] != "timestamp with time zone"):
            continue
        if role != "data" or columns[name] in PAYLOADS:
            found[role] = name
    return {"position": POSITION, "transactionId": TRANSACTION_ID} | found


_USUAL: Final = {
    "messageId": ("messageid", "eventid", "uuid", "guid", "id"),
    "messageType": ("messagetype", "eventtype", "eventname", "type", "kind", "event", "topic"),
    "data": ("data", "payload", "body", "content", "message", "eventdata", "event"),
    "partitionKey": ("partitionkey", "aggregateid", "key", "entityid"),
    "scheduled": ("scheduled", "createdat", "occurredat", "occurredon", "insertedat", "timestamp"),
}


def missing_columns(columns: Mapping[str, str], mapped: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of the pair that the table lacks, with their types."""
    wanted = {mapped.get("transactionId", TRANSACTION_ID): "xid8", mapped.get("position", POSITION): "bigint"}
    return {name: type_ for name, type_ in wanted.items() if name not in columns}


def needed_indexes(mapped: Mapping[str, str], *, publications: bool = False) -> list[list[str]]:
    """Return the columns of each index that reading needs, with either cursor; with `publications` also for those."""
    position, transaction_id = mapped.get("position", POSITION), mapped.get("transactionId", TRANSACTION_ID)
    needed = [[position], [transaction_id, position]]
    if publications and mapped.get("publicationId") is not None:
        needed.append([mapped["publicationId"], transaction_id, position])
    return needed


def missing_indexes(needed: Iterable[Sequence[str]], existing: Iterable[Sequence[str | None]]) -> list[list[str]]:
    """Return those that are not there. An index is there if it is valid, whole and begins with the same columns."""
    there = [list(each) for each in existing]
    return [list(each) for each in needed if not any(found[: len(each)] == list(each) for found in there)]


def _find_faults(kind: Kind, columns: Mapping[str, str], mapped: Mapping[str, str]) -> tuple[str, ...]:
    faults = [kind.refusal] if kind.refusal else []
    for name, wanted in ((mapped["transactionId"], "xid8"), (mapped["position"], "bigint")):
        if columns.get(name, wanted) != wanted:
            faults.append(
                f"its column {name} is {columns[name]}, not {wanted}: choose another name for ours with "
                "--transaction-id-column or --position-column"
            )
    data = mapped.get("data")
    if not kind.refusal and data is not None and columns[data] not in PAYLOADS:
        faults.append(f"its payload {data} is {columns[data]}, which is no JSON: jsonb, json or text can be read")
    return tuple(faults)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()
