"""At most one owner, with real processes and real signals: killed, frozen, asked to stop, taken over."""

from __future__ import annotations

import signal
import time

import pytest

from outbox_core.report import ExitCode
from outbox_worker.postgres.ownership.leases import FRESH
from tests.support.servers.postgres import wait_until
from tests.support.worker import GATED_HANDLER, PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, HandlerGate, build_config

LEASE = 2.0


def gated(outbox, workers, pod, **delivery):
    """A prepared worker whose handler waits in the middle of its first batch."""
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    home = workers.prepare(config, outbox.database.uri(), handler=GATED_HANDLER)
    gate = HandlerGate(home)
    gate.close()
    return workers.launch(home, pod=pod), gate


def standby(outbox, workers, pod="pod-b", **delivery):
    config = build_config(outbox.database, PYTHON_TARGET, delivery=delivery)
    worker = workers.start(config, outbox.database.uri(), handler=GATED_HANDLER, pod=pod)
    report = worker.wait_state("Standby", "LeaseHeld")
    assert "pod-a" in report.message
    assert worker.get("/readyz")[0] == 200
    return worker


def claims(outbox):
    return outbox.connection.execute(
        "SELECT cluster, name, vacated_at IS NOT NULL FROM outbox.processor_claims"
    ).fetchall()


def test_killed_in_the_middle_of_a_batch_nothing_is_lost_or_doubled(outbox, workers):
    ids = outbox.produce(100)
    owner, gate = gated(outbox, workers, "pod-a", batchSize=30)
    gate.wait_entered()
    second = standby(outbox, workers, batchSize=30)
    owner.kill()
    killed = time.monotonic()
    second.wait_for("the standby is owner", lambda r: r.lease is not None and r.lease.held)
    assert time.monotonic() - killed < LEASE + 1.0
    outbox.wait_handled(ids)
    assert second.report().conflicts.count == 0


def test_a_standby_waits_where_the_word_null_in_a_list_is_a_word(outbox, workers):
    """array_nulls = off, as a setting of the database: a standby has no epoch yet."""
    outbox.database.configure("array_nulls", "off")
    owner, gate = gated(outbox, workers, "pod-a")
    ids = outbox.produce(1)
    gate.wait_entered()
    second = standby(outbox, workers)
    owner.kill()
    second.wait_for("the standby is owner", lambda r: r.lease is not None and r.lease.held)
    outbox.wait_handled(ids)
    assert "22P02" not in second.log()


@pytest.mark.parametrize("checkpoint", ["AfterHandling", "BeforeHandling"])
def test_frozen_past_its_lease_a_worker_never_commits_and_becomes_standby(outbox, workers, checkpoint):
    ids = outbox.produce(20)
    owner, gate = gated(outbox, workers, "pod-a", checkpoint=checkpoint)
    gate.wait_entered()
    second = standby(outbox, workers, checkpoint=checkpoint)
    owner.send(signal.SIGSTOP)
    frozen = time.monotonic()
    outbox.wait_handled(ids)
    assert time.monotonic() - frozen < LEASE + 2.0
    gate.open()
    owner.send(signal.SIGCONT)
    report = owner.wait_state("Standby", "LeaseHeld")
    assert report.conflicts.last is not None
    assert (report.conflicts.last.code, report.conflicts.last.needs_person) == (4, False)
    assert (report.conflicts.last.pod, report.conflicts.last.holder_pod) == ("pod-a", "pod-b")
    assert report.conflicts.last.new == outbox.last()
    outbox.produce(5, start=20)
    wait_until(lambda: len(outbox.handled()) == 25, "the new owner goes on")
    assert outbox.handled()[:20] == ids
    assert outbox.connection.execute("SELECT DISTINCT pod FROM handled").fetchall() == [("pod-b",)]
    second.wait_for("it sees the conflict", lambda r: r.conflicts.by_code == {"4": 1})


def test_frozen_inside_a_statement_a_worker_never_commits(outbox, workers):
    ids = outbox.produce(10)
    slow = {
        "sql": {
            "statement": "INSERT INTO handled (message_id, pod) SELECT message_id, pg_sleep(0.1)::text FROM batch "
            "ORDER BY transaction_id, position"
        }
    }
    owner = workers.start(build_config(outbox.database, slow), outbox.database.uri(), pod="pod-a")
    wait_until(
        lambda: (
            outbox.connection.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'WITH batch%' AND state = 'active' "
                "AND pid <> pg_backend_pid()"
            ).fetchone()
            == (1,)
        ),
        "the statement runs",
    )
    owner.send(signal.SIGSTOP)
    second = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri(), pod="pod-b")
    outbox.wait_handled(ids)
    owner.send(signal.SIGCONT)
    report = owner.wait_state("Standby")
    assert report.conflicts.by_code == {"4": 1}
    assert outbox.handled() == ids
    second.wait_for("they are counted", lambda report: report.handled == 10)


def expires_at(outbox):
    return outbox.connection.execute("SELECT expires_at FROM outbox.processor_leases").fetchone()


def fetch_waits(connection, pod):
    """The main thread of the pod's worker waits for a lock, which its heartbeat may do too."""
    rows = connection.execute(
        "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND wait_event_type = 'Lock'",
        (f"outbox orders {pod}",),
    ).fetchall()
    return len(rows) == 1


def handed_over(outbox, worker):
    """What a worker handed to either target."""
    pod = worker.directory.name
    rows = outbox.connection.execute("SELECT message_id FROM handled WHERE pod = %s ORDER BY n", (pod,)).fetchall()
    return [row[0] for row in rows] + [line["messageId"] for line in worker.lines()]


@pytest.mark.parametrize("target", [PYTHON_TARGET, {"log": {}}], ids=["in the database", "outside of it"])
def test_frozen_between_fetch_and_hand_over_a_worker_hands_nothing_over(outbox, workers, target):
    """Its own clock says that the lease lasts, and its next heartbeat is seconds away: only a look at the lease tells.

    With a lease of 30 s a heartbeat comes every 10 s. Right after one, the database's clock is made to say that the
    lease is over.
    """
    config = build_config(outbox.database, target, delivery={"guarantee": "AtLeastOnce", "leaseDuration": "30s"})
    first = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
    first.wait_state("Active")
    second = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
    second.wait_state("Standby", "LeaseHeld")
    before, looking = expires_at(outbox), outbox.database.direct()
    wait_until(lambda: expires_at(outbox) != before, "a heartbeat of the owner")
    with outbox.connection.transaction():
        outbox.connection.execute("LOCK TABLE outbox.messages")
        wait_until(lambda: fetch_waits(looking, "pod-0"), "the owner's fetch waits")
        ids = outbox.produce(5)
        first.send(signal.SIGSTOP)
    outbox.connection.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")
    wait_until(lambda: handed_over(outbox, second) == ids, "the standby hands them over")
    time.sleep(
        2 * FRESH
    )  # so long, no more, what came with the fetch counts: no lease with most of its time ends in it

    first.send(signal.SIGCONT)

    report = first.wait_state("Standby", "LeaseHeld")
    assert handed_over(outbox, first) == []
    assert report.conflicts.last is not None, "the heartbeat told first, so the look was not tested"
    assert (report.conflicts.last.code, report.conflicts.last.pod) == (4, "pod-0")
    wait_until(lambda: outbox.stored() == outbox.last(), "the standby stores its checkpoint")
    assert handed_over(outbox, second) == ids


def test_frozen_between_batches_a_worker_just_becomes_standby(outbox, workers):
    ids = outbox.produce(10)
    owner = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri(), pod="pod-a")
    outbox.wait_handled(ids)
    second = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri(), pod="pod-b")
    owner.send(signal.SIGSTOP)
    second.wait_state("Active")
    owner.send(signal.SIGCONT)
    assert owner.wait_state("Standby").conflicts.count == 0, "it had nothing in hand that could be refused"
    more = outbox.produce(10, start=10)
    outbox.wait_handled(ids + more)
    second.wait_for("they are counted", lambda report: report.handled == 10)


def test_a_handler_may_compute_for_longer_than_the_lease(outbox, workers):
    ids = outbox.produce(10)
    owner, gate = gated(outbox, workers, "pod-a")
    gate.wait_entered()
    second = standby(outbox, workers)
    entered = time.monotonic()
    wait_until(lambda: time.monotonic() - entered > 2 * LEASE, "twice the lease")
    gate.open()
    outbox.wait_handled(ids)
    assert owner.report().conflicts.count == 0
    assert second.report().state == "Standby"


def test_sigterm_finishes_the_batch_and_lets_the_standby_in_at_once(outbox, workers):
    ids = outbox.produce(60)
    owner, gate = gated(outbox, workers, "pod-a", batchSize=20)
    gate.wait_entered()
    second = standby(outbox, workers, batchSize=20)
    owner.send(signal.SIGTERM)
    owner.wait_for("it drains or still handles", lambda r: r.handled == 0)
    gate.open()
    assert owner.process.wait(10) == ExitCode.DONE
    ended = time.monotonic()
    second.wait_for("the standby is owner", lambda r: r.lease is not None and r.lease.held)
    assert time.monotonic() - ended < LEASE
    outbox.wait_handled(ids)
    assert outbox.connection.execute("SELECT count(*) FROM handled WHERE pod = 'pod-a'").fetchone() == (20,)
    assert owner.termination().handled == 20


def test_sigterm_stores_the_checkpoint_of_a_batch_that_cannot_be_recalled(outbox, workers):
    ids = outbox.produce(20)
    owner, gate = gated(outbox, workers, "pod-a", batchSize=20, guarantee="AtLeastOnce")
    gate.wait_entered()
    owner.send(signal.SIGTERM)
    gate.open()
    assert owner.process.wait(10) == ExitCode.DONE
    assert outbox.handled() == ids
    assert outbox.stored() == outbox.last()
    assert outbox.connection.execute("SELECT token FROM outbox.processor_leases").fetchone() == (None,)


def test_sigterm_rolls_a_batch_back_that_does_not_end_within_the_grace_period(outbox, workers):
    outbox.produce(20)
    config = build_config(outbox.database, PYTHON_TARGET)
    home = workers.prepare(config, outbox.database.uri(), handler=GATED_HANDLER)
    gate = HandlerGate(home)
    gate.close()
    owner = workers.launch(home, environment={"OUTBOX_GRACE_SECONDS": "2"})
    gate.wait_entered()
    before = outbox.stored()
    assert owner.terminate(4) == ExitCode.DONE
    assert outbox.handled() == []
    assert outbox.stored() == before
    assert claims(outbox) == [("test", "orders", True)]


def test_sigterm_ends_a_step_that_waits_for_a_locked_table(outbox, workers):
    config = build_config(outbox.database, SQL_TARGET)
    home = workers.prepare(config, outbox.database.uri())
    owner = workers.launch(home, environment={"OUTBOX_GRACE_SECONDS": "2"})
    owner.wait_state("Active", "Idle")
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND application_name NOT LIKE '%heartbeat'"
    with outbox.connection.transaction(force_rollback=True):
        outbox.connection.execute("LOCK TABLE outbox.messages IN ACCESS EXCLUSIVE MODE")
        wait_until(lambda: outbox.connection.execute(waiting).fetchone() is not None, "the worker waits for the lock")
        assert owner.terminate(6) == ExitCode.DONE
    assert claims(outbox) == [("test", "orders", True)]
    assert outbox.connection.execute("SELECT token FROM outbox.processor_leases").fetchone() == (None,)


def test_a_pod_that_drains_does_not_take_the_claim_from_the_resource_created_again(outbox, workers):
    ids = outbox.produce(10)
    former, gate = gated(outbox, workers, "pod-a")
    gate.wait_entered()
    former.send(signal.SIGTERM)
    config = build_config(outbox.database, SQL_TARGET, resource={"uid": "uid-again"})
    again = workers.start(config, outbox.database.uri(), pod="pod-b")
    outbox.wait_handled(ids)
    held = "SELECT c.uid, l.epoch, l.pod FROM outbox.processor_claims c, outbox.processor_leases l"
    seen = set()

    def renewed_often():
        assert outbox.connection.execute(held).fetchall() == [("uid-again", 2, "pod-b")]
        seen.add(outbox.connection.execute("SELECT renewed_at FROM outbox.processor_leases").fetchone())
        return len(seen) > 5

    wait_until(renewed_often, "heartbeats of both")
    gate.open()
    assert former.process.wait(10) == ExitCode.DONE
    assert outbox.handled() == ids
    assert again.report().handled == 10
    assert claims(outbox) == [("test", "orders", False)]


def test_a_claim_vacated_by_another_replica_is_said_again_however_long_the_lease(outbox, workers):
    config = build_config(outbox.database, SQL_TARGET, delivery={"leaseDuration": "10m"})
    workers.start(config, outbox.database.uri()).wait_state("Active")
    assert outbox.connection.execute("SELECT outbox.vacate_claim('orders', 'uid-orders')").fetchone() == (True,)
    wait_until(lambda: claims(outbox) == [("test", "orders", False)], "the claim is said again", 15)


@pytest.mark.parametrize(
    ("intent", "left"),
    [(None, [("test", "orders", True)]), ("KeepClaim", [("test", "orders", False)]), ("ReleaseClaim", [])],
    ids=["without a word", "keep", "release"],
)
def test_what_becomes_of_the_claim_at_sigterm(outbox, workers, intent, left):
    worker = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    worker.wait_state("Active")
    if intent:
        worker.post_intent(intent)
    assert worker.terminate() == 0
    assert claims(outbox) == left
    lease = outbox.connection.execute("SELECT token FROM outbox.processor_leases").fetchone()
    assert lease is None or lease == (None,)


def test_a_second_resource_is_refused_and_names_the_owner(outbox, workers):
    first = workers.start(build_config(outbox.database, SQL_TARGET), outbox.database.uri())
    first.wait_state("Active")
    config = build_config(outbox.database, SQL_TARGET, resource={"namespace": "other", "uid": "uid-other"})
    second = workers.start(config, outbox.database.uri())
    report = second.wait_state("ClaimRefused", "ClaimHeld")
    assert str(report.claim_holder) == "test/shop/orders"
    assert "test/shop/orders owns" in report.message
    assert second.get("/readyz")[0] == 503
    assert second.get("/livez")[0] == 200
    ids = outbox.produce(5)
    outbox.wait_handled(ids)
    assert second.report().handled == 0
    first.post_intent("ReleaseClaim")
    first.terminate()
    second.wait_state("Active")


def test_an_outsider_takes_over_by_force_in_the_middle_of_a_batch(outbox, workers):
    ids = outbox.produce(20)
    owner, gate = gated(outbox, workers, "pod-a")
    gate.wait_entered()
    config = build_config(outbox.database, SQL_TARGET)
    polite = workers.start(config, outbox.database.uri(), "--cluster-id", "elsewhere", pod="laptop")
    polite.wait_state("ClaimRefused")
    polite.terminate()
    outsider = workers.start(config, outbox.database.uri(), "--cluster-id", "elsewhere", "--take-over", pod="laptop")
    outbox.wait_handled(ids)
    gate.open()
    report = owner.wait_state("ClaimRefused", "ClaimHeld")
    assert report.conflicts.last is not None
    assert report.conflicts.last.code == 4
    assert str(report.conflicts.last.holder) == "elsewhere/shop/orders"
    assert str(report.claim_holder) == "elsewhere/shop/orders"
    assert outbox.handled() == ids
    # The outsider leaves and gives the claim up: the resource's own worker is owner again by itself.
    outsider.post_intent("ReleaseClaim")
    outsider.terminate()
    owner.wait_state("Active")
    more = outbox.produce(5, start=20)
    outbox.wait_handled(ids + more)


def test_try_claim_and_release_claim_answer_by_exit_code(outbox, workers):
    config = build_config(outbox.database, SQL_TARGET)
    other = build_config(outbox.database, SQL_TARGET, resource={"name": "copy", "uid": "uid-copy"})
    uri = outbox.database.uri()
    ours = workers.start(config, uri, "--try-claim")
    assert ours.process.wait(20) == ExitCode.DONE
    theirs = workers.start(other, uri, "--try-claim")
    assert theirs.process.wait(20) == ExitCode.CLAIM_HELD
    assert str(theirs.termination().claim_holder) == "test/shop/orders"
    assert theirs.lines()[0]["state"] == "ClaimRefused"
    assert workers.start(other, uri, "--release-claim").process.wait(20) == ExitCode.DONE
    assert claims(outbox) == [("test", "orders", False)]
    assert workers.start(config, uri, "--release-claim").process.wait(20) == ExitCode.DONE
    assert claims(outbox) == []
    down = workers.start(config, "postgresql://nobody@127.0.0.1:1/none", "--release-claim")
    assert down.process.wait(20) == 1
    assert down.termination().reason == "DatabaseUnavailable"
