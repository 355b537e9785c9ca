"""The cursor Snapshot in real worker processes: strangers stall nothing, restarts and rewinds lose nothing."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.servers.postgres import wait_until
from tests.support.worker import GATED_HANDLER, PYTHON_TARGET, build_config
from tests.tools.load.snapshot import run

IN_ORDER = {
    "sql": {
        "statement": "INSERT INTO handled (message_id, total) "
        "SELECT message_id, (data->>'total')::int FROM batch ORDER BY ordinal"
    }
}
SNAPSHOT = {"cursor": "Snapshot"}
PAIRS = {"cursor": "TransactionOrder"}
UNNAMED = {"cursor": None}


def kind_of(outbox):
    return outbox.connection.execute(
        "SELECT cursor_kind, lower_snapshot IS NOT NULL FROM outbox.processor_checkpoints"
    ).fetchone()


@pytest.mark.parametrize("delivery", [{}, {"guarantee": "AtLeastOnce"}, {"checkpoint": "BeforeHandling"}], ids=str)
def test_strangers_and_prepared_transactions_stall_nothing(database, outbox, workers, delivery):
    stranger = database.server.connect("postgres", autocommit=False)
    stranger.execute("SELECT pg_current_xact_id()")
    late = database.direct(autocommit=False)
    late.execute("INSERT INTO outbox.messages (message_id, message_type, data) VALUES ('late', 't', '{\"total\": 1}')")
    late.execute("PREPARE TRANSACTION 'late'")
    config = build_config(database, IN_ORDER, source=SNAPSHOT, delivery=delivery | {"batchSize": 3})

    worker = workers.start(config, database.uri())
    expected = outbox.produce(10)
    outbox.wait_handled(expected)
    report = worker.wait_for("no stall", lambda report: report.lag is not None and report.lag.messages == 0)
    assert report.high_water_mark is None or report.high_water_mark.age_seconds == 0
    database.direct().execute("COMMIT PREPARED 'late'")
    outbox.wait_handled([*expected, "late"])

    stranger.close()
    assert kind_of(outbox) == ("Snapshot", True)
    assert worker.terminate() == 0


def test_a_kill_inside_a_range_repeats_and_loses_nothing(database, outbox, workers):
    config = build_config(database, PYTHON_TARGET, source=SNAPSHOT, delivery={"batchSize": 2})
    expected = outbox.produce(9)
    late = database.direct(autocommit=False)
    worker = workers.start(config, database.uri(), handler=GATED_HANDLER)
    outbox.wait_handled(expected)
    late.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) VALUES ('behind', 't', '{\"total\": 1}')"
    )
    (worker.directory / "hold").touch()
    more = outbox.produce(5, start=9)
    wait_until((worker.directory / "entered").exists, "the handler is inside the second snapshot range")

    worker.kill()
    late.commit()
    workers.start(config, database.uri(), handler=GATED_HANDLER)

    wait_until(lambda: len(outbox.handled()) >= 15, "everything handled")
    handled = outbox.handled()
    assert sorted(handled) == sorted([*expected, *more, "behind"])
    assert [name for name in handled if name != "behind"] == [*expected, *more]


def test_a_checkpoint_keeps_its_kind(database, outbox, workers):
    """A resource that names no cursor goes on with what is stored; one that names another one is refused."""
    pairs = workers.start(build_config(database, IN_ORDER, source=PAIRS), database.uri())
    outbox.wait_handled(outbox.produce(3))
    assert pairs.terminate() == 0
    assert kind_of(outbox) == ("TransactionOrder", False)

    refused = workers.start(build_config(database, IN_ORDER, source=SNAPSHOT), database.uri())
    message = refused.wait_state("Unavailable", "CursorDiffers").message
    assert "of cursor TransactionOrder, and source.cursor is Snapshot" in message
    assert refused.terminate() == 0

    unnamed = workers.start(build_config(database, IN_ORDER, source=UNNAMED), database.uri())
    outbox.produce(2, start=3)
    wait_until(lambda: len(outbox.handled()) == 5, "goes on with pairs")
    assert unnamed.terminate() == 0
    assert kind_of(outbox) == ("TransactionOrder", False)


def test_a_new_processor_without_a_cursor_reads_ranges_and_keeps_them(database, outbox, workers):
    first = workers.start(build_config(database, IN_ORDER, source=UNNAMED), database.uri())
    outbox.wait_handled(outbox.produce(3))
    assert first.terminate() == 0
    assert kind_of(outbox) == ("Snapshot", True)

    refused = workers.start(build_config(database, IN_ORDER, source=PAIRS), database.uri())
    message = refused.wait_state("Unavailable", "CursorDiffers").message
    assert "of cursor Snapshot, and source.cursor is TransactionOrder" in message
    assert refused.terminate() == 0

    workers.start(build_config(database, IN_ORDER, source=UNNAMED), database.uri())
    outbox.wait_handled([*(f"message-{n}" for n in range(1, 4)), *outbox.produce(2, start=3)])


@pytest.mark.parametrize(
    ("cursor", "order"), [("Snapshot", "position"), ("TransactionOrder", "transaction_id, position")]
)
def test_the_ordinal_sorts_a_batch_as_the_cursor_does(database, outbox, workers, cursor, order):
    """The transaction that took its id first inserted last: the two cursors differ."""
    early = database.direct(autocommit=False)
    early.execute("SELECT pg_current_xact_id()")
    insert = "INSERT INTO outbox.messages (message_id, message_type, data) VALUES (%s, 't', '{\"total\": 1}')"
    outbox.connection.execute(insert, ["late-id"])
    early.execute(insert, ["early-id"])
    early.commit()
    outbox.connection.execute("CREATE TABLE seen (ordinal bigint, message_id text)")
    statement = "INSERT INTO seen SELECT ordinal, message_id FROM batch"
    config = build_config(database, {"sql": {"statement": statement}}, source={"cursor": cursor})
    workers.start(config, database.uri())

    def seen():
        return [row[0] for row in outbox.connection.execute("SELECT message_id FROM seen ORDER BY ordinal").fetchall()]

    wait_until(lambda: len(seen()) == 2, "both are handled")
    expected = outbox.connection.execute(f"SELECT message_id FROM outbox.messages ORDER BY {order}").fetchall()
    assert seen() == [row[0] for row in expected]
    assert seen()[0] == {"Snapshot": "late-id", "TransactionOrder": "early-id"}[cursor]


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ({"type": "End"}, ["open", "after"]),
        ({"type": "Position", "position": 4}, ["message-4", "message-5", "open", "after"]),
        ({"type": "Timestamp", "timestamp": "2000-01-01T00:00:00Z"}, ["message-1", "message-5", "open", "after"]),
    ],
    ids=["End", "Position", "Timestamp"],
)
def test_a_start_loses_nothing_that_is_in_flight(database, outbox, workers, start, expected):
    outbox.produce(4)
    flight = database.direct(autocommit=False)
    flight.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) VALUES ('open', 't', '{\"total\": 1}')"
    )
    outbox.produce(1, start=4)
    worker = workers.start(build_config(database, IN_ORDER, source=SNAPSHOT, startFrom=start), database.uri())
    worker.wait_for("started", lambda report: bool(report.checkpoints))
    flight.commit()
    outbox.connection.execute(
        "INSERT INTO outbox.messages (message_id, message_type, data) VALUES ('after', 't', '{\"total\": 1}')"
    )
    wait_until(lambda: "after" in outbox.handled(), "the last one is handled")

    handled = outbox.handled()
    assert handled == sorted(set(handled), key=handled.index)
    assert [name for name in handled if name in expected] == expected
    if start["type"] != "Timestamp":
        assert handled == expected


def test_filtered_messages_move_the_checkpoint_without_a_write_each(database, outbox, workers):
    source = SNAPSHOT | {"messageTypes": ["Wanted"]}
    worker = workers.start(build_config(database, IN_ORDER, source=source), database.uri())
    outbox.produce(50, message_type="Unwanted")
    outbox.wait_handled(outbox.produce(2, start=50, message_type="Wanted"))
    worker.wait_for("no lag", lambda report: report.lag is not None and report.lag.messages == 0)
    assert worker.terminate() == 0


def test_a_small_load_with_kills_loses_repeats_and_reorders_nothing(database, tmp_path):
    """`OUTBOX_LOAD_ROWS` and `OUTBOX_LOAD_SEED` make it larger and another one; the long version is a program."""
    rows, seed = int(os.environ.get("OUTBOX_LOAD_ROWS", "4000")), int(os.environ.get("OUTBOX_LOAD_SEED", "7"))

    result = run(database, tmp_path, rows=rows, writers=3, seed=seed, most=30)

    assert all(line.clean for line in result.lines), json.dumps([str(line) for line in result.lines])
    assert result.lines[0].stored >= rows


def test_a_failing_message_blocks_its_key_only(database, outbox, workers):
    outbox.connection.execute("ALTER TABLE handled ADD CONSTRAINT refused CHECK (message_id <> 'm2')")
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n % 5, 'm' || n, 't', jsonb_build_object('total', n) FROM generate_series(0, 29) AS n"
    )
    delivery = {
        "blocks": "Key",
        "batchSize": 10,
        "retry": {"maxAttempts": 1000, "initialBackoff": "50ms", "maxBackoff": "100ms"},
    }
    worker = workers.start(build_config(database, IN_ORDER, source=SNAPSHOT, delivery=delivery), database.uri())
    worker.wait_for("its key waits", lambda report: report.failures is not None and report.failures.held == 6)
    outbox.connection.execute("ALTER TABLE handled DROP CONSTRAINT refused")

    def names():
        return [row[0] for row in outbox.connection.execute("SELECT message_id FROM handled ORDER BY n").fetchall()]

    wait_until(lambda: len(names()) >= 30, "what was held is handled")
    assert sorted(names()) == sorted(f"m{n}" for n in range(30))
    assert [name for name in names() if int(name[1:]) % 5 == 2] == [f"m{n}" for n in range(2, 30, 5)]
