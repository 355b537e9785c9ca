"""One owner for a processorId: duplicates, a foreign owner, a hand-over."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from tests.acceptance.scenarios import Scenarios, until_handled
from tests.support.kubernetes.cluster import wait

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms

scenarios = Scenarios()


@scenarios.add
def a_duplicate_runs_nothing_names_the_owner_and_takes_over(rooms: Rooms) -> None:
    with ExitStack() as stack:
        one, two = stack.enter_context(rooms.room()), stack.enter_context(rooms.room())
        rooms.cluster.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "db", "namespace": two.namespace},
                "stringData": one.shop.secret,
            }
        )
        owner = one.processor("orders")
        owner.until_ready()
        duplicate = two.processor("copy", processorId="orders")
        said = duplicate.until_condition("OwnershipGranted", "False", "ClaimHeld")
        assert f"{one.namespace}/orders" in said["message"]
        duplicate.until_condition("Ready", "False", "ClaimHeld")
        duplicate.until_condition("Stalled", "True", "ClaimHeld")
        wait(
            "a try was refused by the database",
            lambda: duplicate.status["ownership"]["tries"] >= 1,
            within=30,
            explain=lambda: rooms.cluster.explain(two.namespace),
        )
        assert duplicate.pods() == []
        assert rooms.cluster.need("Deployment", two.namespace, "copy-worker")["spec"]["replicas"] == 0
        assert owner.condition("Ready")["status"] == "True"
        started = time.monotonic()
        owner.delete()
        duplicate.until_ready(within=60)
        print(f"taken over {time.monotonic() - started:.1f} s after the owner was deleted")
        one.shop.produce(3)
        duplicate.until("it handles", lambda: len(one.handled()) == 3)
        duplicate.until_event("OwnershipGranted")


@scenarios.add
def a_foreign_owner_by_force_stops_it_and_it_returns_by_itself(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(3)
        until_handled(room, orders, 3)
        room.shop.query(
            "SELECT outbox.claim_processor('orders', 'elsewhere', 'shop', 'orders', 'foreign', p_force => true)"
        )
        said = orders.until_condition("OwnershipGranted", "False", "ClaimHeld")
        assert "elsewhere/shop/orders" in said["message"]
        orders.until_no_pods()
        assert any("elsewhere/shop/orders" in event for event in orders.events())
        room.shop.query("SELECT outbox.release_claim('orders', 'foreign')")
        started = time.monotonic()
        orders.until_ready(within=90)
        print(f"owner again {time.monotonic() - started:.1f} s after the outsider stopped")
        room.shop.produce(3)
        until_handled(room, orders, 6)
        assert len(set(room.handled())) == 6


@scenarios.add_at_night
def handed_over_the_other_resource_goes_on(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(4)
        until_handled(room, orders, 4)
        heir = room.processor("heir", processorId="orders")
        heir.until_condition("OwnershipGranted", "False", "ClaimHeld")
        orders.spec(handOverTo={"namespace": room.namespace, "name": "heir"})
        orders.until_ready("HandedOver")
        heir.until_ready(within=30)
        assert orders.condition("OwnershipGranted")["status"] == "False"
        assert orders.pods() == []
        room.shop.produce(4)
        until_handled(room, heir, 8)
        assert len(set(room.handled())) == 8
