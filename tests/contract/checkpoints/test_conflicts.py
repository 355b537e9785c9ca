"""Refusals that are kept, and what a person decides about them."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.config import Resolution
from outbox_core.errors import ConfigurationError
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints, conflicts
from outbox_worker.postgres.progress.conflicts import ResolveAnswer
from tests.support.database.contract import put
from tests.support.database.stored import stored_pair
from tests.support.servers.postgres import EVERYWHERE

KEY = ProcessorKey("outbox", "orders")
RESOURCE = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
EXPECTED, STORED, NEW = Checkpoint(10, 1), Checkpoint(15, 7), Checkpoint(20, 5)


def refusal(code=StoreAnswer.AHEAD, *, needs_person=True, stored=STORED):
    return conflicts.Refusal(
        code=code, expected=EXPECTED, stored=stored, new=NEW, epoch=3, pod="pod-1", claim_uid="u1",
        needs_person=needs_person,
    )  # fmt: skip


@pytest.fixture
def connection(each_database):
    connection = each_database.connect()
    ownership.claim(connection, KEY, RESOURCE)
    put(connection, (15, 7))
    return connection


def resolve(connection, number, action="Accept", pair="15:7"):
    resolution = Resolution(conflict_id=number, action=action, pair=pair, decided_by="annotation")
    return conflicts.resolve(connection, "outbox", resolution)


def test_a_summary_over_all_pods(connection):
    assert conflicts.summary(connection, KEY).count == 0
    conflicts.record_refusal(connection, KEY, refusal(StoreAnswer.NOT_OWNER, needs_person=False))
    number = conflicts.record_refusal(connection, KEY, refusal())
    conflicts.record_refusal(connection, KEY, refusal(StoreAnswer.NOT_OWNER, needs_person=False, stored=None))

    summary = conflicts.summary(connection, KEY)

    assert (summary.count, summary.by_code, summary.unowned_calls) == (3, {"2": 1, "4": 2}, 0)
    assert summary.last is not None
    assert (summary.last.code, summary.last.stored, summary.last.needs_person) == (4, None, False)
    assert summary.open is not None
    assert (summary.open.id, summary.open.expected, summary.open.stored, summary.open.new) == (
        number, "10:1", "15:7", "20:5",
    )  # fmt: skip
    assert (summary.open.holder, summary.open.pod, summary.open.epoch) == (RESOURCE, "pod-1", 3)


def test_it_names_the_owner_of_the_moment(connection):
    token = uuid4()
    ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="pod-2", token=token, lease=timedelta(hours=1))
    conflicts.record_refusal(connection, KEY, refusal(StoreAnswer.NOT_OWNER, needs_person=False))

    last = conflicts.summary(connection, KEY).last

    assert last is not None
    assert last.holder_pod == "pod-2"


def test_accept_needs_the_pair_that_the_person_saw(connection):
    number = conflicts.record_refusal(connection, KEY, refusal())

    assert resolve(connection, number, pair="15:8") is ResolveAnswer.PAIR_DIFFERS
    assert conflicts.summary(connection, KEY).open is not None
    assert resolve(connection, number) is ResolveAnswer.DONE
    assert resolve(connection, number) is ResolveAnswer.ALREADY
    assert conflicts.summary(connection, KEY).open is None
    assert conflicts.summary(connection, KEY).count == 1


def test_accept_is_refused_where_the_row_is_gone(connection):
    number = conflicts.record_refusal(connection, KEY, refusal(StoreAnswer.OLDER, stored=None))
    put(connection, None)

    assert resolve(connection, number) is ResolveAnswer.PAIR_DIFFERS
    assert resolve(connection, number, "Rewind", "10:1") is ResolveAnswer.DONE
    assert stored_pair(connection, KEY) == EXPECTED


def test_rewind_stores_and_records(connection):
    number = conflicts.record_refusal(connection, KEY, refusal())

    assert resolve(connection, number, "Rewind", "10:1") is ResolveAnswer.DONE

    assert stored_pair(connection, KEY) == EXPECTED
    act = connection.execute(
        "SELECT action, from_transaction_id::text, from_position, to_transaction_id::text, to_position, decided_by, "
        "reason FROM outbox.audit_log"
    ).fetchall()
    assert act == [("Rewind", "15", 7, "10", 1, "annotation", f"conflict {number}")]


def test_one_decision_closes_every_open_conflict_of_the_partition(connection):
    first = conflicts.record_refusal(connection, KEY, refusal())
    conflicts.record_refusal(connection, KEY, refusal())

    assert resolve(connection, first) is ResolveAnswer.DONE
    assert conflicts.summary(connection, KEY).open is None


@EVERYWHERE
def test_nothing_moves_while_an_owner_lives(connection):
    number = conflicts.record_refusal(connection, KEY, refusal())
    connection.execute(
        "INSERT INTO outbox.processor_leases (processor_id, epoch, token, expires_at) "
        "VALUES ('orders', 9, gen_random_uuid(), clock_timestamp() + interval '1 hour')"
    )

    assert resolve(connection, number, "Rewind", "10:1") is ResolveAnswer.OWNER_LIVE
    assert not conflicts.rewind(connection, KEY, EXPECTED, reason="a test", decided_by="me")
    assert stored_pair(connection, KEY) == STORED

    connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")
    assert conflicts.rewind(connection, KEY, EXPECTED, reason="a test", decided_by="me")
    assert stored_pair(connection, KEY) == EXPECTED


def test_unknown_conflicts_and_those_that_wait_for_nobody(connection):
    number = conflicts.record_refusal(connection, KEY, refusal(StoreAnswer.NOT_OWNER, needs_person=False))

    assert resolve(connection, number) is ResolveAnswer.UNKNOWN
    assert resolve(connection, number + 1) is ResolveAnswer.UNKNOWN


def test_a_decision_without_a_pair_is_refused(connection):
    with pytest.raises(ConfigurationError, match="transaction_id>:<position"):
        resolve(connection, 1, "Rewind", None)


def test_old_ones_go_and_are_counted_but_never_what_waits_for_a_person(database):
    connection = database.connect()
    ownership.claim(connection, KEY, RESOURCE)
    put(connection, (15, 7))
    waiting = conflicts.record_refusal(connection, KEY, refusal())
    other = conflicts.record_refusal(connection, ProcessorKey("outbox", "others"), refusal())
    decided = ProcessorKey("outbox", "orders", 1)
    settled = conflicts.record_refusal(connection, decided, refusal(StoreAnswer.OLDER))
    connection.execute(
        "UPDATE outbox.processor_conflicts SET resolved_at = now(), resolution = 'Accept', decided_by = 'somebody' "
        "WHERE id = %s",
        (settled,),
    )
    connection.execute(
        "SELECT outbox.record_refusal('orders', 0, 4, NULL, NULL, NULL, NULL, NULL, NULL, 1, 'pod', 'u1', false) "
        "FROM generate_series(1, 1050)"
    )

    kept = [row[0] for row in connection.execute("SELECT id FROM outbox.processor_conflicts ORDER BY id").fetchall()]

    assert len(kept) == 1 + 1 + 1000
    assert kept[:2] == [waiting, other]
    found = conflicts.summary(connection, KEY)
    assert (found.by_code, found.count) == ({"2": 1, "3": 1, "4": 1050}, 1052)
    assert found.open is not None
    assert found.open.id == waiting


def test_the_last_acts_are_kept(database):
    connection = database.direct()
    act = "INSERT INTO outbox.audit_log (action, reason, decided_by) SELECT 'Rewind', n::text, 'x' "

    connection.execute(f"{act} FROM generate_series(1, 10020) AS n")
    connection.execute(f"{act} FROM generate_series(10021, 10021) AS n")

    rows = connection.execute("SELECT count(*), min(reason::int), max(reason::int) FROM outbox.audit_log").fetchone()
    assert rows == (10000, 22, 10021)


def test_who_records_an_act_waits_for_no_transaction_that_has_recorded_one(database):
    """One that skips a message records that, and may be long: nothing waits for the oldest act that it deletes."""
    connection, skipping = database.connect(), database.connect(autocommit=False)
    act = "INSERT INTO outbox.audit_log (action, reason, decided_by) SELECT 'Skip', n::text, 'x' "
    connection.execute(f"{act} FROM generate_series(1, 10000) AS n")
    skipping.execute(f"{act} FROM generate_series(10001, 10001) AS n")

    connection.execute("SET lock_timeout = '100ms'")
    connection.execute(f"{act} FROM generate_series(10002, 10002) AS n")
    skipping.commit()
    connection.execute(f"{act} FROM generate_series(10003, 10003) AS n")

    assert connection.execute("SELECT count(*) FROM outbox.audit_log").fetchone() == (10000,)


def test_what_a_person_decided_last_of_each_partition_is_kept_however_many_acts_others_made(database):
    """Kafka's transactions tell by it what was published before a rewind, Spark of when its directory is."""
    connection = database.direct()
    connection.execute(
        """INSERT INTO outbox.audit_log (action, processor_id, partition, reason, decided_by) VALUES
           ('Rewind', 'orders', 0, 'first', 'x'), ('Rewind', 'orders', 0, 'last', 'x'),
           ('Rewind', 'orders', 1, '', 'x'), ('Accept', 'orders', 0, '', 'x'), ('GiveUp', 'orders', 0, '', 'x'),
           ('ChangePartitions', 'bills', NULL, '', 'x')"""
    )
    orders, other, bills = KEY, ProcessorKey("outbox", "orders", 1), ProcessorKey("outbox", "bills", 3)
    moved = [checkpoints.fetch_last_move(connection, key) for key in (orders, other, bills)]
    assert len(set(moved)) == 3

    for _ in range(2):
        connection.execute(
            "INSERT INTO outbox.audit_log (action, processor_id, partition, reason, decided_by) "
            "SELECT 'Skip', 'orders', 0, n::text, 'x' FROM generate_series(1, 10000) AS n"
        )

    assert [checkpoints.fetch_last_move(connection, key) for key in (orders, other, bills)] == moved
    acts = connection.execute(
        "SELECT action, reason FROM outbox.audit_log WHERE action <> 'Skip' ORDER BY id"
    ).fetchall()
    assert acts == [("Rewind", "last"), *[(act, "") for act in ("Rewind", "Accept", "GiveUp", "ChangePartitions")]]
    assert connection.execute("SELECT count(*) FROM outbox.audit_log WHERE action = 'Skip'").fetchone() == (10000,)
