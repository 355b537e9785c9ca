"""What a worker does with each answer of the contract, and with a COMMIT that got none."""

from __future__ import annotations

import json

import pytest

from tests.support.servers.postgres import wait_until
from tests.support.servers.proxy import CommitCutter, Cut
from tests.support.worker import GATED_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config


@pytest.fixture
def gated(outbox, workers):
    """A worker in the middle of its first batch of 10, its gate, and its home."""
    outbox.produce(10)
    config = build_config(outbox.database, PYTHON_TARGET, delivery={"leaseDuration": "10s"})
    home = workers.prepare(config, outbox.database.uri(), handler=GATED_HANDLER)
    gate = HandlerGate(home)
    gate.close()
    worker = workers.launch(home)
    gate.wait_entered()
    return worker, gate, home


def edit(outbox, pair):
    """Somebody with rights on the table changes the row, past the contract."""
    transaction_id, position = pair.split(":")
    outbox.connection.execute(
        "UPDATE outbox.processor_checkpoints SET last_processed_transaction_id = %s, last_processed_position = %s",
        (transaction_id, position),
    )


def restart(workers, worker, home, resolution=None):
    """As the operator would after a person decided."""
    worker.post_intent("KeepClaim")
    assert worker.terminate() == 0
    config = json.loads((home / "processor.json").read_text()) | {"resolution": resolution}
    (home / "processor.json").write_text(json.dumps(config))
    return workers.launch(home)


def test_0_rolls_back_and_skips_to_the_stored_pair(outbox, gated):
    worker, gate, _ = gated
    edit(outbox, outbox.last())
    gate.open()
    more = outbox.produce(3, start=10)
    outbox.wait_handled(more)
    assert worker.report().conflicts.count == 0
    assert 'outbox_conflicts_total{code="0",processor="orders"} 1.0' in worker.get("/metrics")[1]


def test_2_blocks_until_a_person_accepts_the_stored_pair(outbox, gated, workers):
    worker, gate, home = gated
    ahead = outbox.last()
    more = outbox.produce(4, start=10)
    edit(outbox, outbox.last().partition(":")[0] + ":12")
    gate.open()
    report = worker.wait_state("Blocked", "CheckpointAhead")
    conflict = report.conflicts.open
    assert conflict is not None
    assert (conflict.code, conflict.expected, conflict.new, conflict.needs_person) == (2, "0:0", ahead, True)
    assert conflict.stored is not None
    assert f'accept-checkpoint: "{conflict.id}={conflict.stored}"' in report.message
    assert outbox.handled() == []
    assert worker.get("/readyz")[0] == 503

    wrong = {"conflictId": conflict.id, "action": "Accept", "pair": "1:1", "decidedBy": "somebody"}
    worker = restart(workers, worker, home, wrong)
    assert "another pair" in worker.wait_state("Blocked").message
    right = wrong | {"pair": conflict.stored}
    worker = restart(workers, worker, home, right)
    outbox.wait_handled(more[2:])
    report = worker.wait_for("no conflict is open", lambda r: r.conflicts.open is None and r.conflicts.count == 1)
    acts = outbox.connection.execute("SELECT action, decided_by FROM outbox.audit_log").fetchall()
    assert acts == [("Accept", "somebody")]


def test_3_blocks_until_a_person_rewinds(outbox, workers):
    ids = outbox.produce(10)
    config = build_config(outbox.database, PYTHON_TARGET, delivery={"leaseDuration": "10s"})
    home = workers.prepare(config, outbox.database.uri(), handler=GATED_HANDLER)
    worker = workers.launch(home)
    outbox.wait_handled(ids)
    gate = HandlerGate(home)
    gate.close()
    more = outbox.produce(5, start=10)
    gate.wait_entered()
    edit(outbox, "5:5")
    gate.open()
    report = worker.wait_state("Blocked", "CheckpointOlder")
    assert report.conflicts.open is not None
    assert (report.conflicts.open.code, report.conflicts.open.stored) == (3, "5:5")
    assert outbox.handled() == ids
    pair = report.conflicts.open.expected
    worker = restart(workers, worker, home, {"conflictId": report.conflicts.open.id, "action": "Rewind", "pair": pair})
    outbox.wait_handled(ids + more)


def test_a_deleted_row_is_3_and_can_only_be_rewound(outbox, gated):
    worker, gate, _ = gated
    outbox.connection.execute("DELETE FROM outbox.processor_checkpoints")
    gate.open()
    report = worker.wait_state("Blocked", "CheckpointOlder")
    assert report.conflicts.open is not None
    assert (report.conflicts.open.code, report.conflicts.open.stored) == (3, None)
    assert "accept" not in report.message
    assert "rewind-checkpoint" in report.message


def test_an_open_conflict_blocks_every_other_worker_too(outbox, gated, workers):
    worker, gate, home = gated
    second = workers.start(
        build_config(outbox.database, SQL_TARGET, delivery={"leaseDuration": "10s"}), outbox.database.uri()
    )
    second.wait_state("Standby")
    edit(outbox, "999999:1")  # beyond what this server has reached: no start could be made from it
    gate.open()
    report = worker.wait_state("Blocked")
    second.wait_state("Blocked", "CheckpointAhead")
    second.kill()
    assert outbox.handled() == []
    assert report.conflicts.open is not None
    restart(workers, worker, home, {"conflictId": report.conflicts.open.id, "action": "Rewind", "pair": "0:0"})
    outbox.wait_handled([f"message-{n}" for n in range(1, 11)])


def waits_for_lock(outbox):
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return outbox.connection.execute(waiting).fetchone() is not None


@pytest.mark.parametrize("cut", list(Cut), ids=lambda cut: cut.name)
@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
def test_a_commit_without_an_answer_is_adopted_and_no_conflict(outbox, workers, cut, target):
    proxy = CommitCutter(outbox.database.server.port)
    try:
        config = build_config(outbox.database, target, delivery={"leaseDuration": "4s"})
        worker = workers.start(config, proxy.uri(outbox.database.uri()), handler=GATED_HANDLER)
        worker.wait_state("Active", "Idle")
        proxy.arm(cut, after=b"store_processor_checkpoint", once=True)
        holder = outbox.database.direct(autocommit=False)
        # More is there when the worker asks what became of its batch: a new attempt would be another batch.
        holder.execute("LOCK TABLE handled IN SHARE MODE")
        ids = outbox.produce(10)
        wait_until(lambda: waits_for_lock(outbox), "the batch is being handled")
        more = outbox.produce(10, start=10)
        holder.rollback()
        wait_until(lambda: proxy.cuts == 1, "a COMMIT was cut")
        outbox.wait_handled(ids + more)
        report = worker.wait_for("all is stored", lambda r: r.handled == 20)
        assert report.conflicts.count == 0
        assert outbox.stored() == outbox.last()
    finally:
        proxy.close()


def test_a_stranger_is_told_4_and_counted(outbox, workers):
    ids = outbox.produce(5)
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    outbox.wait_handled(ids)
    before = outbox.stored()
    with outbox.connection.transaction(force_rollback=True):
        answer = outbox.connection.execute(
            "SELECT outbox.store_processor_checkpoint('orders', 99::bigint, 5::bigint, '999'::xid8)"
        ).fetchone()
    assert answer == (4,)
    worker.wait_for("the stranger is counted", lambda r: r.conflicts.unowned_calls == 1)
    assert outbox.stored() == before
