"""Deleted whatever is gone with it: nothing waits for ever, and the checkpoint stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_operator.api.naming import PROCESSOR_LABEL
from tests.acceptance.scenarios import Scenarios, until_handled
from tests.support.kubernetes.cluster import wait

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms

scenarios = Scenarios()


@scenarios.add
def deleted_with_its_secret_gone_it_goes(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        rooms.cluster.delete("Secret", room.namespace, "db")
        orders.delete()
        wait("the resource is gone", lambda: not orders.read(), within=10)
        orders.until_no_pods(within=45)


@scenarios.add
def deleted_with_the_database_gone_it_goes(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        rooms.server.shut(room.shop)
        orders.delete()
        wait("the resource is gone", lambda: not orders.read(), within=10)
        orders.until_no_pods(within=45)
        rooms.server.open(room.shop)


@scenarios.add
def deleted_its_claim_is_free_and_its_checkpoint_stays(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(3)
        until_handled(room, orders, 3)
        orders.spec(suspend=True)
        orders.until_ready("Suspended")
        orders.delete()
        wait(
            "the claim is released",
            lambda: room.shop.query("SELECT count(*) FROM outbox.processor_claims") == [(0,)],
            within=30,
            explain=lambda: rooms.cluster.explain(room.namespace),
        )
        wait("the release job sweeps itself", lambda: not rooms.cluster.items("Job", room.namespace), within=45)
        again = room.processor("orders", startFrom={"type": "End"})
        again.until_ready()
        room.shop.produce(1)
        until_handled(room, again, 4)
        again.until_event("StartFromNotUsed")
        assert len(set(room.handled())) == 4


@scenarios.add
def deleted_before_it_ever_ran_it_starts_no_job(rooms: Rooms) -> None:
    with rooms.room() as room:
        idle, ran = room.processor("idle", suspend=True), room.processor("ran")
        idle.until_ready("Suspended")
        ran.until_ready()
        idle.delete()
        ran.delete()

        def jobs() -> list[str]:
            found = rooms.cluster.items("Job", room.namespace)
            # Those of resources that were in this room before end by themselves.
            return [name for job in found if (name := job["metadata"]["labels"][PROCESSOR_LABEL]) in ("idle", "ran")]

        # Deletions are worked off in order: the other's job would be there before this one.
        wait("the job of the one that ran is there", lambda: "ran" in jobs(), within=45)
        assert jobs() == ["ran"]
