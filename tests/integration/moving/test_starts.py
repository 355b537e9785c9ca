"""Where a processor starts: never behind what is in flight, and where another one stands."""

from __future__ import annotations

import os
import random
from datetime import UTC, datetime

import pytest

from outbox_core.progress.checkpoint import Checkpoint, parse_checkpoint
from outbox_core.progress.coverage import as_snapshot_range
from outbox_core.progress.snapshot_range import SnapshotRange
from outbox_core.spec import StartFrom
from outbox_worker.postgres.progress import starts
from outbox_worker.postgres.reading.messages import MessageReader
from tests.integration.moving.conftest import BOTH
from tests.support.servers.postgres import build_source, wait_until
from tests.support.worker import SQL_TARGET, build_config

SOURCE = build_source()
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)
SNAPSHOT = {"cursor": "Snapshot"}
PAIRS = {"cursor": "TransactionOrder"}
TWO = {"mode": "Partitioned", "partitions": {"count": 2}}


class Writers:
    """Transactions that are open at once; a random schedule inserts into them and ends them."""

    def __init__(self, database, seed):
        self._database = database
        self._chance = random.Random(seed)
        self._open = []
        self._prepared = []
        self._number = 0

    def step(self):
        what = self._chance.random()
        if what < 0.3 or not self._open:
            connection = self._database.direct(autocommit=False)
            connection.execute("SELECT pg_current_xact_id()")
            self._open.append(connection)
        elif what < 0.75:
            self.insert(self._chance.choice(self._open))
        else:
            self.end(self._open.pop(self._chance.randrange(len(self._open))))

    def insert(self, connection):
        self._number += 1
        connection.execute(
            "INSERT INTO outbox.messages (message_id, message_type, data) VALUES (%s, 'T', '{}')", (str(self._number),)
        )

    def end(self, connection):
        how = self._chance.random()
        if how < 0.2:
            connection.rollback()
        elif how < 0.4:
            name = f"{self._database.name}-{self._number}-{len(self._prepared)}"
            connection.execute(f"PREPARE TRANSACTION '{name}'")
            connection.commit()
            self._prepared.append(name)
        else:
            connection.commit()
        connection.close()

    def finish(self):
        for connection in self._open:
            self.end(connection)
        admin = self._database.direct()
        for name in self._prepared:
            admin.execute(f"COMMIT PREPARED '{name}'")


def visible(database):
    rows = database.direct().execute("SELECT message_id, position, scheduled FROM outbox.messages").fetchall()
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("seed", [1, 7, None])
@pytest.mark.parametrize("kind", ["End", "Position", "Timestamp"])
def test_nothing_that_is_in_flight_at_the_start_is_lost(database, kind, seed):
    """Known fault 5, attacked: open, prepared and rolled back transactions, whose ids and positions are interleaved."""
    seed = seed or int(os.environ.get("OUTBOX_SEED", "0")) or random.randrange(1 << 30)
    print(f"OUTBOX_SEED={seed}")
    writers = Writers(database, seed)
    for _ in range(40):
        writers.step()
    before = visible(database)
    (middle,) = database.direct().execute("SELECT clock_timestamp()").fetchone()
    position = max((each[0] for each in before.values()), default=0) // 2
    start = {
        "End": StartFrom.model_validate({"type": "End"}),
        "Position": StartFrom.model_validate({"type": "Position", "position": position}),
        "Timestamp": StartFrom.model_validate({"type": "Timestamp", "timestamp": middle}),
    }[kind]
    pair = starts.start_pair(database.direct(), SOURCE, start)
    for _ in range(40):
        writers.step()
    writers.finish()

    read = {m.message_id for m in MessageReader(SOURCE).fetch(database.direct(), pair, 1000).messages}
    after = visible(database)
    wanted = {
        "End": set(after) - set(before),
        "Position": {each for each, (at, _) in after.items() if at >= position},
        "Timestamp": {each for each, (_, when) in after.items() if when >= middle},
    }[kind]
    assert wanted - read == set()
    assert wanted


class TestWhereAnotherProcessorStands:
    @staticmethod
    def other(outbox, pairs, *, by="partition key"):
        """A processor `first` that stands there; several pairs, or snapshot ranges: divided."""
        for partition, pair in enumerate(pairs):
            snapshot_range = pair.snapshot_range or SnapshotRange()
            outbox.connection.execute(
                "INSERT INTO outbox.processor_checkpoints (processor_id, partition, last_processed_transaction_id, "
                "last_processed_position, cursor_kind, lower_snapshot, upper_snapshot, range_position) VALUES "
                "('first', %s, %s::text::xid8, %s, %s, %s::text::pg_snapshot, %s::text::pg_snapshot, %s)",
                (
                    partition, str(pair.transaction_id), pair.position,
                    "TransactionOrder" if pair.snapshot_range is None else "Snapshot",
                    snapshot_range.lower, snapshot_range.upper, snapshot_range.position,
                ),
            )  # fmt: skip
        if len(pairs) > 1:
            outbox.connection.execute(
                "INSERT INTO outbox.processor_partitions VALUES ('first', %s, %s)", (len(pairs), by)
            )

    @staticmethod
    def produce(outbox, count):
        """Messages in transactions of their own; their pairs."""
        pairs = []
        for number in range(count):
            outbox.produce(1, start=number)
            pairs.append(parse_checkpoint(outbox.last()))
        return pairs

    @staticmethod
    def snapshot_range(outbox):
        """A checkpoint that has examined whatever is committed now."""
        (now,) = outbox.connection.execute("SELECT pg_current_snapshot()::text").fetchone()
        return Checkpoint(0, 1, SnapshotRange(now))

    @staticmethod
    def caught_up(worker):
        """Nothing is left to read: what is handled now is all that it handles."""
        return worker.wait_for(
            "it has caught up",
            lambda r: r.lag is not None and r.lag.messages == 0 and r.handled > 0 and r.state in ("Active", "Idle"),
        )

    @staticmethod
    def config(outbox, **fields):
        start = {"type": "Processor", "processorId": "first"}
        source = PAIRS | fields.pop("source", {})
        return build_config(outbox.database, SQL_TARGET, startFrom=start, source=source, **fields)

    @staticmethod
    def hold_back(outbox):
        """Open a transaction that stays open: no partition may pass what later ones stored."""
        outbox.database.direct(autocommit=False).execute("SELECT txid_current()")

    @staticmethod
    def first_stored(worker, count):
        """Where it began: nothing matches, and `hold_back` lets no idle partition pass what others would handle."""
        report = worker.wait_for("it is begun", lambda r: len(r.checkpoints) == count)
        return [view.pair for view in report.checkpoints]

    def test_ordered_from_ordered(self, outbox, workers):
        pairs = self.produce(outbox, 5)
        self.other(outbox, [pairs[2]])
        worker = workers.start(self.config(outbox), outbox.database.uri())
        outbox.wait_handled(["message-4", "message-5"])
        assert worker.report().start_from_used is True

    def test_ordered_from_partitioned_takes_the_lowest(self, outbox, workers):
        pairs = self.produce(outbox, 5)
        self.other(outbox, [pairs[3], pairs[1], pairs[4]])
        worker = workers.start(self.config(outbox), outbox.database.uri())
        outbox.wait_handled(["message-3", "message-4", "message-5"])
        report = self.caught_up(worker)
        assert (report.start_from_used, report.handled) == (True, 3)
        assert outbox.stored() == outbox.last()

    @pytest.mark.parametrize(
        ("by", "mine"),
        [("partition key", [2, 0, 4]), ("column other", [0, 0, 0])],
        ids=["with the same key partition by partition", "with another key the lowest"],
    )
    def test_partitioned_from_partitioned(self, outbox, workers, by, mine):
        self.hold_back(outbox)
        pairs = self.produce(outbox, 5)
        self.other(outbox, [pairs[2], pairs[0], pairs[4]], by=by)
        delivery = {"mode": "Partitioned", "partitions": {"count": 3}}
        nothing = {"messageTypes": ["Nothing"]}
        worker = workers.start(self.config(outbox, delivery=delivery, source=nothing), outbox.database.uri())
        assert self.first_stored(worker, 3) == [str(pairs[each]) for each in mine]

    def test_partitioned_from_ordered(self, outbox, workers):
        pairs = self.produce(outbox, 5)
        self.other(outbox, [pairs[2]])
        delivery = {"mode": "Partitioned", "partitions": {"count": 2}}
        worker = workers.start(self.config(outbox, delivery=delivery), outbox.database.uri())
        wait_until(lambda: sorted(outbox.handled()) == ["message-4", "message-5"], "what lies behind is handled")
        report = self.caught_up(worker)
        assert (report.start_from_used, report.handled) == (True, 2)
        assert sorted(outbox.handled()) == ["message-4", "message-5"]

    @pytest.mark.parametrize("delivery", [{}, TWO], ids=["ordered", "partitioned"])
    def test_ranges_from_a_pair_go_on_exactly_behind_it(self, outbox, workers, delivery):
        """Also in the middle of a transaction's messages."""
        self.produce(outbox, 2)
        outbox.produce(3, start=2)
        last = parse_checkpoint(outbox.last())
        self.other(outbox, [Checkpoint(last.transaction_id, last.position - 1)])
        self.produce(outbox, 1)
        expected = [*outbox.produce(2, start=5)]
        worker = workers.start(self.config(outbox, source=SNAPSHOT, delivery=delivery), outbox.database.uri())
        wait_until(lambda: len(outbox.handled()) >= 4, "what lies behind is handled")
        report = self.caught_up(worker)
        assert sorted(outbox.handled()) == sorted(["message-5", "message-1", *expected])
        assert (report.start_from_used, report.handled) == (True, 4)

    def test_pairs_from_a_range_miss_nothing_that_it_had_left(self, outbox, workers):
        """What comes again: what began after the transaction that was open."""
        self.produce(outbox, 2)
        late = outbox.database.direct(autocommit=False)
        late.execute(
            "INSERT INTO outbox.messages (message_id, message_type, data) VALUES ('late', 'T', '{\"total\": 1}')"
        )
        self.produce(outbox, 1)
        self.other(outbox, [self.snapshot_range(outbox)])
        outbox.produce(1, start=3)
        late.commit()
        worker = workers.start(self.config(outbox, source=PAIRS), outbox.database.uri())
        outbox.wait_handled(["late", "message-1", "message-4"])
        report = self.caught_up(worker)
        assert (report.start_from_used, report.handled) == (True, 3)
        assert outbox.handled() == ["late", "message-1", "message-4"]

    def test_ranges_from_several_take_what_is_common_to_them(self, outbox, workers):
        places = []
        for number in range(5):
            outbox.produce(1, start=number)
            places.append(self.snapshot_range(outbox))
        self.other(outbox, [places[3], places[1], places[4]])
        worker = workers.start(self.config(outbox, source=SNAPSHOT), outbox.database.uri())
        outbox.wait_handled(["message-3", "message-4", "message-5"])
        report = self.caught_up(worker)
        assert (report.start_from_used, report.handled) == (True, 3)

    @pytest.mark.parametrize(
        ("as_ranges", "array_nulls"),
        [
            pytest.param(True, "on", id="from snapshot ranges"),
            pytest.param(False, "on", id="from pairs"),
            pytest.param(True, "off", id="where the word null in a list is a word"),
        ],
    )
    def test_ranges_partition_by_partition_where_the_keys_are_divided_alike(
        self, outbox, workers, as_ranges, array_nulls
    ):
        outbox.database.configure("array_nulls", array_nulls)
        self.hold_back(outbox)
        places = []
        for number in range(4):
            outbox.produce(1, start=number)
            places.append(self.snapshot_range(outbox) if as_ranges else parse_checkpoint(outbox.last()))
        stand = [places[2], places[0]]
        self.other(outbox, stand)
        fields = {"source": SNAPSHOT | {"messageTypes": ["Nothing"]}, "delivery": TWO}
        worker = workers.start(self.config(outbox, **fields), outbox.database.uri())
        self.first_stored(worker, 2)
        rows = outbox.connection.execute(
            "SELECT lower_snapshot::text, range_position FROM outbox.processor_checkpoints "
            "WHERE processor_id = 'orders' ORDER BY partition"
        ).fetchall()
        assert rows == [(as_snapshot_range(each).lower, as_snapshot_range(each).position) for each in stand]

    def test_without_a_checkpoint_it_is_refused_and_goes_on_when_there_is_one(self, outbox, workers):
        pairs = self.produce(outbox, 3)
        worker = workers.start(self.config(outbox), outbox.database.uri())
        report = worker.wait_state("Unavailable", "StartNotFound")
        assert "processor 'first' has no checkpoint in schema outbox" in report.message
        self.other(outbox, [pairs[1]])
        outbox.wait_handled(["message-3"])

    def test_computed_once(self, outbox, workers):
        """The other one's later moves, back or forward, mean nothing to it."""
        pairs = self.produce(outbox, 5)
        self.other(outbox, [pairs[3]])
        first = workers.start(self.config(outbox), outbox.database.uri())
        outbox.wait_handled(["message-5"])
        first.terminate()
        outbox.connection.execute("DELETE FROM outbox.processor_checkpoints WHERE processor_id = 'first'")
        outbox.produce(1, start=5)
        second = workers.start(self.config(outbox), outbox.database.uri())
        outbox.wait_handled(["message-5", "message-6"])
        assert second.report().start_from_used is False


@BOTH
def test_a_projection_elsewhere_goes_on_where_one_of_the_source_stands(apart):
    """How a projection moves into another database: stop, start there from the former's checkpoint."""
    outbox = apart.outbox
    ids = outbox.produce(10)
    config = build_config(outbox.database, SQL_TARGET, processor_id="first", source={"cursor": apart.cursor})
    former = apart.workers.start(config, outbox.database.uri())
    outbox.wait_handled(ids)
    former.terminate()
    more = outbox.produce(5, start=10)
    worker = apart.start(startFrom={"type": "Processor", "processorId": "first"})
    apart.wait_handled(more)
    wait_until(lambda: apart.has_examined(outbox.last()), "the checkpoint is at the last message")
    report = worker.wait_for("it has caught up", lambda r: r.lag is not None and r.lag.messages == 0)
    assert (report.start_from_used, report.handled) == (True, 5)
    assert apart.handled() == more
    assert outbox.handled() == ids


def test_a_processor_of_another_source_is_no_start(apart):
    ids = apart.outbox.produce(3)
    apart.start(processor_id="first")
    apart.wait_handled(ids)
    # In the target's database, where `first` stores its checkpoint, this one reads that database's own messages.
    start = {"type": "Processor", "processorId": "first"}
    config = build_config(apart.target, {"sql": {"statement": "SELECT 1 FROM batch"}}, startFrom=start)
    worker = apart.workers.start(config, apart.target.uri())
    report = worker.wait_state("Unavailable", "StartNotFound")
    assert "reads another database" in report.message
