"""A projection into another database, and one that is built anew and swapped, as a user applies them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_sql import runner
from tests.acceptance.scenarios import Scenarios, until_handled

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms

scenarios = Scenarios()


@scenarios.add
def a_projection_lives_in_another_database_with_its_checkpoint(rooms: Rooms) -> None:
    with rooms.room() as room:
        report = rooms.server.make()
        with room.shop.connect() as connection:
            runner.migrate(connection, "outbox")
        report.query("CREATE TABLE seen (position bigint)")
        room.secret("reporting", **report.secret)
        statement = "INSERT INTO seen SELECT position FROM batch"
        target = {"sql": {"statement": statement, "connection": {"secretRef": {"name": "reporting"}}}}
        orders = room.processor("orders", target=target, worker={"replicas": 2})
        orders.until_ready()
        room.shop.produce(20)
        orders.until("all are projected", lambda: report.query("SELECT count(*) FROM seen") == [(20,)], 60)
        assert room.shop.query("SELECT count(*) FROM outbox.processor_checkpoints") == [(0,)]
        assert report.query("SELECT processor_id, name FROM outbox.processor_claims") == [("orders", "orders")]
        orders.until_condition("SourceCurrent", "True")


@scenarios.add_at_night
def a_rebuilt_projection_is_swapped_for_the_old_one(rooms: Rooms) -> None:
    with rooms.room() as room:
        old = room.processor("orders")
        old.until_ready()
        room.shop.produce(20)
        until_handled(room, old, 20)
        room.shop.query("CREATE TABLE anew (position bigint)")
        room.shop.query("CREATE VIEW read AS SELECT position FROM handled")
        swap = "CREATE OR REPLACE VIEW read AS SELECT position FROM anew"
        new = room.processor(
            "orders-v2",
            target={"sql": {"statement": "INSERT INTO public.anew SELECT position FROM batch"}},
            rebuildOf={"processorId": "orders", "swapStatement": swap},
        )
        new.until_condition("Swapped", "True", "Swapped", within=120)
        assert new.status["rebuild"]["of"] == "orders"
        assert new.metrics()['outbox_rebuild_swapped{processor="orders-v2"}'] == 1
        old.until_condition("Ready", "False", "Superseded")
        old.until_condition("Stalled", "True", "Superseded")
        room.shop.produce(5)
        new.until("the new one goes on", lambda: room.shop.query("SELECT count(*) FROM read") == [(25,)], 60)
        assert len(room.handled()) == 20
        new.until_ready()
