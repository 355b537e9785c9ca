"""Somebody else changes the checkpoint: what is shown, and what a person decides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.acceptance.scenarios import Scenarios, block, until_handled
from tests.support.kubernetes.room import BY_PAIRS

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.room import Resource, Room

scenarios = Scenarios()


def conflict(room: Room, orders: Resource, change: int) -> dict[str, Any]:
    """Block the processor; see that nothing runs, and that it is told."""
    opened = block(room, orders, change)
    orders.until_condition("Stalled", "True")
    orders.until_no_pods()
    assert len(room.handled()) == 5, "nothing is handled while a conflict is open"
    orders.until_event("CheckpointConflict")
    return opened


@scenarios.add
def a_checkpoint_edited_ahead_waits_until_a_person_accepts(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        opened = conflict(room, orders, 1)
        assert opened["code"] == 2
        orders.annotate(accept_checkpoint="nonsense")
        orders.until_event("AnnotationInvalid")
        orders.annotate(accept_checkpoint=f"{opened['id']}={opened['stored']}")
        orders.until_ready()
        orders.until("the annotation is gone", lambda: not _annotations(orders))
        orders.until_event("ConflictResolved")
        orders.until_condition("CheckpointHealthy", "True")
        room.shop.produce(2)
        until_handled(room, orders, 8)


@scenarios.add_at_night
def a_decision_about_another_pair_is_refused_and_can_be_corrected(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        opened = conflict(room, orders, 1)
        orders.annotate(accept_checkpoint=f"{opened['id']}={opened['expected']}")
        orders.until("the refusal is told", lambda: "another pair" in orders.condition("Ready").get("message", ""))
        assert len(room.handled()) == 5, "nothing is handled while a conflict is open"
        orders.annotate(accept_checkpoint=f"{opened['id']}={opened['stored']}")
        orders.until_ready()
        orders.until("the annotation is gone", lambda: not _annotations(orders))
        room.shop.produce(2)
        until_handled(room, orders, 8)


@scenarios.add
def a_checkpoint_edited_back_waits_until_a_person_rewinds(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", source=BY_PAIRS)
        opened = conflict(room, orders, -1)
        assert opened["code"] == 3
        orders.annotate(rewind_checkpoint=f"{opened['id']}={opened['expected']}")
        until_handled(room, orders, 6)
        orders.until_ready()
        orders.until("the annotation is gone", lambda: not _annotations(orders))
        assert len(set(room.handled())) == len(room.handled()) == 6


def _annotations(resource: Resource) -> list[str]:
    found = resource.read()["metadata"].get("annotations", {})
    return [name for name in found if name.startswith("outbox-operator.dev/")]


@scenarios.add
def a_stranger_is_refused_and_counted(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders", source=BY_PAIRS)
        orders.until_ready()
        answer = room.shop.query("SELECT outbox.store_processor_checkpoint('orders', 99, NULL, '99'::xid8)")
        assert answer == [(4,)]
        orders.until("the stranger is counted", lambda: orders.status["conflicts"]["unownedCalls"] >= 1)
        orders.until_event("UnownedCallerRefused")
        assert orders.condition("Ready")["status"] == "True"
