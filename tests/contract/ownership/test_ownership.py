"""Claims and leases through the adapter: who may have a processor, and when it changes hands."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest

from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import conflicts
from tests.support.servers.postgres import EVERYWHERE

pytestmark = EVERYWHERE
KEY = ProcessorKey("outbox", "orders")
HOUR = timedelta(hours=1)


def resource(uid="u1", name="a", cluster="c"):
    return ResourceRef(cluster=cluster, namespace="n", name=name, uid=uid)


def acquire(connection, uid="u1", pod="pod-1", token=None, lease=HOUR):
    return ownership.acquire_lease(connection, KEY, claim_uid=uid, pod=pod, token=token or uuid4(), lease=lease)


@pytest.fixture
def connection(each_database):
    return each_database.connect()


class TestClaim:
    def test_the_first_claimant_keeps_it(self, connection):
        assert ownership.fetch_claim(connection, KEY).holder is None
        assert ownership.claim(connection, KEY, resource()).granted

        refused = ownership.claim(connection, KEY, resource("u2", "b"))

        assert (refused.granted, refused.holder) == (False, resource())
        assert ownership.fetch_claim(connection, KEY).holder == resource()

    def test_saying_it_again_writes_nothing(self, each_database, connection):
        since = ownership.claim(connection, KEY, resource()).claimed_at
        again = each_database.connect(autocommit=False)

        answer = ownership.claim(again, KEY, resource())

        assert (answer.granted, answer.claimed_at) == (True, since)
        assert again.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)

    def test_a_refusal_writes_nothing(self, each_database, connection):
        ownership.claim(connection, KEY, resource())
        other = each_database.connect(autocommit=False)

        assert not ownership.claim(other, KEY, resource("u2", "b")).granted
        assert other.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)

    def test_the_same_resource_created_again_gets_it_at_once(self, connection):
        ownership.claim(connection, KEY, resource())

        assert ownership.claim(connection, KEY, resource("u2")).holder == resource("u2")

    def test_it_never_lapses_while_its_resource_exists(self, connection):
        """Its pods may all be gone, for a year: only the operator or a person ends it."""
        assert ownership.claim(connection, KEY, resource()).granted
        assert acquire(connection, lease=timedelta(0)).acquired
        connection.execute("UPDATE outbox.processor_claims SET claimed_at = clock_timestamp() - interval '1 year'")
        refused = ownership.claim(connection, KEY, resource("u2", "b"))
        assert (refused.granted, refused.holder) == (False, resource())
        assert ownership.claim(connection, KEY, resource()).granted

    @pytest.mark.parametrize(("seconds", "granted"), [(29, False), (31, True)])
    def test_a_vacated_claim_is_anybodys_after_30_seconds(self, connection, seconds, granted):
        ownership.claim(connection, KEY, resource())
        assert ownership.vacate_claim(connection, KEY, "u1")
        connection.execute(
            "UPDATE outbox.processor_claims SET vacated_at = clock_timestamp() - make_interval(secs => %s)", (seconds,)
        )

        assert ownership.claim(connection, KEY, resource("u2", "b")).granted is granted

    def test_its_holder_takes_a_vacated_claim_back(self, connection):
        ownership.claim(connection, KEY, resource())
        ownership.vacate_claim(connection, KEY, "u1")
        assert ownership.fetch_claim(connection, KEY).vacated_at is not None

        answer = ownership.claim(connection, KEY, resource())

        assert (answer.granted, answer.vacated_at) == (True, None)

    @pytest.mark.parametrize(("cluster", "granted"), [("c", True), ("d", False)])
    def test_only_the_holders_cluster_can_sweep_it(self, connection, cluster, granted):
        ownership.claim(connection, KEY, resource())

        answer = ownership.claim(connection, KEY, resource("u2", "b", cluster), sweep_uids=["u0", "u1"])

        assert answer.granted is granted

    def test_handed_over_it_waits_for_the_one_named(self, connection):
        ownership.claim(connection, KEY, resource())
        acquire(connection)
        assert ownership.hand_over_claim(connection, KEY, "u1", resource("unknown", "b"))

        assert not ownership.claim(connection, KEY, resource()).granted
        assert ownership.claim(connection, KEY, resource("u2", "b")).granted
        assert acquire(connection, "u2").acquired

    def test_released_it_is_free_and_its_lease_ended(self, connection):
        ownership.claim(connection, KEY, resource())
        token = uuid4()
        epoch = acquire(connection, token=token).epoch
        assert not ownership.release_claim(connection, KEY, "u2")
        assert ownership.release_claim(connection, KEY, "u1")

        assert not ownership.renew_lease(connection, KEY, HeldLease(0, epoch, token), lease=HOUR)
        assert ownership.claim(connection, KEY, resource("u2", "b")).granted

    def test_taken_by_force_and_taken_back_when_the_outsider_stops(self, connection):
        ownership.claim(connection, KEY, resource())
        acquire(connection)
        assert ownership.claim(connection, KEY, resource("u9", "z", "x"), force=True).granted
        assert acquire(connection, "u9").epoch == 2
        assert not ownership.claim(connection, KEY, resource()).granted

        ownership.release_claim(connection, KEY, "u9")

        assert ownership.claim(connection, KEY, resource()).granted
        assert acquire(connection).epoch == 3

    def test_processors_do_not_meet(self, connection):
        ownership.claim(connection, KEY, resource())

        assert ownership.claim(connection, ProcessorKey("outbox", "other"), resource("u2", "b")).granted


class TestLease:
    @pytest.fixture(autouse=True)
    def _claimed(self, connection):
        assert ownership.claim(connection, KEY, resource()).granted

    def test_one_process_has_it(self, connection):
        first = acquire(connection)
        second = acquire(connection, pod="pod-2")

        assert (first.acquired, first.epoch, first.pod) == (True, 1, "pod-1")
        assert (second.acquired, second.epoch, second.pod) == (False, 1, "pod-1")
        assert second.expires_at == first.expires_at

    def test_a_standby_that_asks_writes_nothing(self, each_database, connection):
        acquire(connection)
        standby = each_database.connect(autocommit=False)

        assert not acquire(standby, pod="pod-2").acquired
        assert standby.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)

    def test_a_lapsed_lease_does_not_come_back_under_its_epoch(self, connection):
        token = uuid4()
        acquire(connection, token=token, lease=timedelta(0))

        assert not ownership.renew_lease(connection, KEY, HeldLease(0, 1, token), lease=HOUR)
        assert acquire(connection, token=token).epoch == 2

    def test_given_back_a_standby_gets_it_at_once(self, connection):
        token = uuid4()
        acquire(connection, token=token)
        assert ownership.release_lease(connection, KEY, HeldLease(0, 1, token))

        assert acquire(connection, pod="pod-2").epoch == 2
        assert not ownership.release_lease(connection, KEY, HeldLease(0, 1, token))

    def test_renewed_by_its_holder_only(self, connection):
        token = uuid4()
        acquire(connection, token=token)

        assert ownership.renew_lease(connection, KEY, HeldLease(0, 1, token), lease=HOUR)
        assert not ownership.renew_lease(connection, KEY, HeldLease(0, 1, uuid4()), lease=HOUR)
        assert not ownership.renew_lease(connection, KEY, HeldLease(0, 2, token), lease=HOUR)

    def test_refused_to_another_resources_process(self, connection):
        assert not acquire(connection, "u2").acquired
        assert acquire(connection).acquired

    def test_refused_while_a_conflict_waits_for_a_person(self, connection):
        refusal = conflicts.Refusal(
            code=StoreAnswer.AHEAD, expected=Checkpoint(1, 1), stored=Checkpoint(2, 2), new=Checkpoint(3, 3), epoch=1,
            pod="pod-1", claim_uid="u1", needs_person=True,
        )  # fmt: skip
        conflicts.record_refusal(connection, KEY, refusal)

        assert not acquire(connection).acquired
        assert acquire(connection).epoch is None

    def test_the_same_resource_created_again_fences_its_former_pods(self, connection):
        token = uuid4()
        acquire(connection, token=token)
        ownership.claim(connection, KEY, resource("u2"))

        assert not ownership.renew_lease(connection, KEY, HeldLease(0, 1, token), lease=HOUR)
        assert acquire(connection, "u2").epoch == 2


def test_the_bounds_of_a_transaction_end_with_it(each_database):
    connection = each_database.connect(autocommit=False)
    ownership.limit_transaction(connection, timedelta(seconds=15))
    inside = connection.execute("SHOW idle_in_transaction_session_timeout").fetchone()
    connection.commit()

    assert inside == ("12s",)
    assert connection.execute("SHOW idle_in_transaction_session_timeout").fetchone() == ("0",)
