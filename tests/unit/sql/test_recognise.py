"""Which outbox a table is, by its columns; and what a person is told about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from outbox_operator.api.resources import parse_processor
from outbox_sql import runner
from outbox_sql.guide import (
    build_grants,
    build_manifest,
    build_steps,
    build_table,
    describe_change_over,
    name_of,
    trial_of,
)
from outbox_sql.recognise import missing_indexes, needed_indexes, recognise

UTC = "timestamp with time zone"
OURS = {
    "position": "bigint", "transaction_id": "xid8", "publication_id": "text", "partition_key": "text",
    "message_id": "text", "message_type": "text", "data": "jsonb", "metadata": "jsonb", "scheduled": UTC,
}  # fmt: skip
SCALED = {
    "id": "uuid", "type": "character varying", "content": "jsonb", "occurred_on_utc": UTC, "processed_on_utc": UTC,
    "error": "text",
}  # fmt: skip
EF_SCALED = {"Id": "uuid", "Type": "text", "Content": "text", "OccurredOnUtc": UTC, "ProcessedOnUtc": UTC}
DEBEZIUM = {
    "id": "uuid", "aggregatetype": "character varying", "aggregateid": "character varying",
    "type": "character varying", "payload": "jsonb",
}  # fmt: skip
RAILS = {
    "id": "bigint", "identifier": "uuid", "event": "character varying", "payload": "jsonb",
    "aggregate": "character varying", "aggregate_identifier": "uuid", "created_at": "timestamp without time zone",
}  # fmt: skip
RES = {
    "id": "bigint", "split_key": "character varying", "format": "character varying", "payload": "text",
    "created_at": "timestamp without time zone", "enqueued_at": "timestamp without time zone",
}  # fmt: skip
NSERVICEBUS = {
    "MessageId": "character varying", "Dispatched": "boolean", "DispatchedAt": "timestamp without time zone",
    "PersistenceVersion": "character varying", "Operations": "jsonb",
}  # fmt: skip
MASSTRANSIT = {
    "SequenceNumber": "bigint", "EnqueueTime": UTC, "SentTime": UTC, "Headers": "text", "Properties": "text",
    "InboxMessageId": "uuid", "InboxConsumerId": "uuid", "OutboxId": "uuid", "MessageId": "uuid",
    "ContentType": "character varying", "MessageType": "text", "Body": "text", "ConversationId": "uuid",
    "CorrelationId": "uuid", "InitiatorId": "uuid", "RequestId": "uuid", "SourceAddress": "character varying",
    "DestinationAddress": "character varying", "ResponseAddress": "character varying",
    "FaultAddress": "character varying", "ExpirationTime": UTC,
}  # fmt: skip
WOLVERINE = {
    "id": "uuid", "owner_id": "integer", "destination": "character varying", "deliver_by": UTC, "body": "bytea",
    "attempts": "integer", "message_type": "character varying",
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "kind", "payload"),
    [
        (OURS, "ours", "data"), (SCALED, "scaled", "content"), (EF_SCALED, "scaled", "Content"),
        (DEBEZIUM, "debezium", "payload"), (RAILS, "rails-outbox", "payload"), (RES, "ruby-event-store", "payload"),
        (NSERVICEBUS, "nservicebus", "Operations"), (MASSTRANSIT, "masstransit", "Body"),
        (WOLVERINE, "wolverine", "body"),
    ],
)  # fmt: skip
def test_each_outbox_is_known_by_its_columns_and_mapped(columns, kind, payload):
    found = recognise(columns)
    assert found is not None
    assert (found.kind.name, found.columns["data"]) == (kind, payload)
    known = set(columns) | set(found.missing) | {"message_type"}
    assert set(found.columns.values()) <= known


def test_a_table_that_is_none_is_not_recognised():
    assert recognise({"id": "bigint", "name": "text", "payload": "jsonb"}) is None


def test_adopted_it_is_recognised_still():
    found = recognise(SCALED | {"transaction_id": "xid8", "position": "bigint"})
    assert found is not None
    assert (found.kind.name, found.missing, found.faults) == ("scaled", {}, ())
    assert (found.ordered_by, found.handled_at) == ("occurred_on_utc", "processed_on_utc")


def test_adopted_it_lacks_no_type_any_more():
    found = recognise(NSERVICEBUS | {"transaction_id": "xid8", "position": "bigint", "message_type": "text"})
    assert found is not None
    assert (found.columns["messageType"], found.missing) == ("message_type", {})


def test_what_cannot_be_read_says_what_to_do():
    wolverine = recognise(WOLVERINE)
    taken = recognise(SCALED | {"position": "text"})
    assert wolverine is not None
    assert taken is not None
    assert "binary envelope" in wolverine.faults[0]
    assert "--position-column" in taken.faults[0]


def test_an_outbox_without_a_type_gets_a_column_for_it():
    found = recognise(NSERVICEBUS)
    assert found is not None
    assert found.missing == {"transaction_id": "xid8", "position": "bigint", "message_type": "text"}
    assert found.columns["messageType"] == "message_type"


def test_a_time_without_a_zone_is_no_scheduled():
    found = recognise(RAILS)
    assert found is not None
    assert "scheduled" not in found.columns


def test_indexes_that_are_there_need_not_be_built():
    needed = needed_indexes({"publicationId": "p"}, publications=True)
    assert needed == [["position"], ["transaction_id", "position"], ["p", "transaction_id", "position"]]
    assert missing_indexes(needed, [["transaction_id", "position", "x"]]) == [needed[0], needed[2]]


@pytest.mark.parametrize("columns", [OURS, SCALED, DEBEZIUM, RAILS, NSERVICEBUS, MASSTRANSIT])
def test_the_manifest_is_one_that_the_api_server_takes(columns):
    found = recognise(columns)
    assert found is not None
    body = yaml.safe_load(build_manifest(schema="public", table="OutboxMessage", columns=found.columns))
    assert body["metadata"] == {"name": trial_of("public", "OutboxMessage")}
    processor = parse_processor(
        {"metadata": {**body["metadata"], "namespace": "d", "uid": "u"}, "spec": body["spec"]}, "c"
    )
    table = processor.spec.source.table
    assert table is not None
    assert table.columns.model_dump(by_alias=True, exclude_none=True) == found.columns
    assert yaml.safe_load(build_table("public", "null", {"data": "yes"}))["table"]["name"] == "null"


def test_our_own_table_needs_no_mapping():
    assert "table:" not in build_manifest(schema="outbox", table="messages", columns=None)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("outbox_messages", "outbox-messages"), ("x" * 40, "x" * 40), ("Outbox Messages$", "outbox-messages-#"),
        ("2fa", "outbox-2fa-#"), ("é", "outbox-#"), ("_", "outbox-#"), ("x" * 63, "x" * 31 + "-#"),
        ("a" * 30 + "_" + "b" * 30, "a" * 30 + "-#"), ("orders_trial", "orders-trial-#"),
        ("orders_0123abcd", "orders-0123abcd-#"),
    ],
)  # fmt: skip
def test_its_processor_is_called_as_a_resource_may_be(table, name):
    assert re.fullmatch(name.replace("#", "[0-9a-f]{8}"), name_of("public", table))
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", trial_of("public", table))
    assert len(trial_of("public", table)) <= 52


def test_tables_of_one_name_in_two_schemas_have_processors_of_two_names():
    """One processorId for both would begin with the second table where it had come to in the first."""
    names = {
        yaml.safe_load(build_manifest(schema=schema, table="outbox", columns={}))["metadata"]["name"]
        for schema in ("orders", "billing", "public")
    }
    assert names == {"orders--outbox-trial", "billing--outbox-trial", "outbox-trial"}
    assert any("name: orders--outbox and" in step for step in describe_change_over("orders", "outbox"))


ALIKE = [
    ("public", "orders_outbox"), ("public", "orders-outbox"), ("public", "orders__outbox"), ("public", "Orders_outbox"),
    ("public", "_orders_outbox"), ("public", "orders.outbox"), ("public", "orders_outbox_trial"), ("orders", "outbox"),
    ("Orders", "outbox"), ("orders", "Outbox"), ("public", "orders--outbox"), ("orders_", "outbox"),
    ("orders", "_outbox"), ("public", "2"), ("public", "outbox_2"), ("public", "é"), ("public", "outbox"),
    *(("public", f"{'orders_' * 7}{region}") for region in ("east", "west")),
]  # fmt: skip


def test_no_two_tables_are_told_one_name():
    """Nor is one's trial called as the other's processor."""
    told = [name(*each) for each in ALIKE for name in (name_of, trial_of)]
    assert len(set(told)) == len(told)
    named = [("public", each.replace("-", "_")) for each in told]
    assert not {name_of(*each) for each in named if each not in ALIKE} & set(told)


def test_names_are_quoted_where_sql_needs_it():
    assert 'GRANT SELECT ON public."OutboxMessage" TO processor;' in build_grants("public", "OutboxMessage")


def test_the_grants_about_our_schema_are_those_of_the_page():
    page = Path(runner.__file__).with_name("README.md").read_text().split("### A processor\n")[1]
    wanted = " ".join(page.split("```")[1].removeprefix("sql").split())
    assert " ".join(build_grants("public", "orders_outbox")[2:]) == wanted


def test_the_change_over_takes_the_pair_from_what_was_handled():
    found = recognise(EF_SCALED)
    assert found is not None
    steps = describe_change_over("public", "t", handled=found.is_handled, poller="the poller")
    assert any('SET transaction_id = NULL WHERE "ProcessedOnUtc" IS NOT NULL' in step for step in steps)
    assert describe_change_over("public", "t", note="first this")[0] == "first this"


@pytest.mark.parametrize(
    ("columns", "waits"),
    [
        (RES, "NOT (enqueued_at IS NOT NULL)"), (NSERVICEBUS, 'NOT ("Dispatched")'),
        (DEBEZIUM, "NOT (<it is handled>)"),
    ],
)  # fmt: skip
def test_rows_that_no_processor_reads_are_left_to_the_old_poller(columns, waits):
    found = recognise(columns)
    assert found is not None
    steps = describe_change_over("public", "t", poller="the poller", handled=found.is_handled)
    (left,) = [n for n, step in enumerate(steps) if step.startswith("let the poller handle")]
    (stopped,) = [n for n, step in enumerate(steps) if step.startswith("stop the poller")]
    assert steps[left].endswith(f"SELECT count(*) FROM public.t WHERE transaction_id IS NULL AND {waits};")
    assert left < stopped
    numbered = describe_change_over("public", "t", poller="the poller", handled=found.is_handled, backfilled=True)
    assert numbered == [step for n, step in enumerate(steps) if n != left]


def test_the_trial_and_the_real_processor_have_names_of_their_own():
    """What a processor has handled, no target that it is given later ever gets."""
    trial, real = (step for step in describe_change_over("public", "orders") if "manifest" in step)
    assert "orders-trial is then the processorId that has handled these messages" in trial
    assert "write name: orders and the target" in real
    assert (
        yaml.safe_load(build_manifest(schema="public", table="orders", columns={}))["metadata"]["name"]
        == "orders-trial"
    )


def test_steps_name_the_lock_and_about_how_long():
    steps = build_steps(
        columns={"position": "bigint"}, indexes=[["position"]], rows=10_000_000, size=4_000_000_000, backfills=True,
        lock_timeout="300ms",
    )  # fmt: skip
    assert [step.lock.split()[0] for step in steps] == ["ACCESS", "ROW", "SHARE"]
    assert "about 8 min" in str(steps[1])
