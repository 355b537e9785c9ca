"""Trouble with the database: a condition says what to do, and it recovers by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.acceptance.scenarios import Scenarios, recovers, run_outbox, until_handled

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms

scenarios = Scenarios()


@scenarios.add
def a_missing_secret_is_named(rooms: Rooms) -> None:
    with rooms.room() as room:
        source = {"connection": {"secretRef": {"name": "other-db"}}}
        orders = room.processor("orders", source=source)
        said = orders.until_condition("Ready", "False", "ConnectionSecretInvalid")
        assert "'other-db'" in said["message"]
        room.secret("other-db")
        recovers(room, orders)


@scenarios.add
def a_wrong_password_is_named(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.secret("db", password="wrong")
        orders = room.processor("orders")
        said = orders.until_condition("Ready", "False", "AuthenticationFailed")
        assert said["message"]
        assert room.shop.password not in said["message"]
        room.secret("db")
        recovers(room, orders)


@scenarios.add
def a_database_that_is_down_is_named_and_awaited(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        rooms.server.shut(room.shop)
        said = orders.until_condition("Ready", "False")
        assert said["message"]
        assert orders.pods(), "unknown is never zero"
        assert orders.condition("OwnershipGranted")["status"] == "True"
        rooms.server.open(room.shop)
        recovers(room, orders)


@scenarios.add
def an_absent_schema_is_named_when_it_is_only_verified(rooms: Rooms) -> None:
    with rooms.room() as room:
        source = {"connection": {"secretRef": {"name": "db"}}, "schema": "Verify"}
        orders = room.processor("orders", source=source)
        said = orders.until_condition("Ready", "False", "SchemaMissing")
        assert "outbox migrate" in said["message"]
        manager = room.processor("manager", processorId="manager")
        manager.until_ready()
        recovers(room, orders, processors=2)


@scenarios.add
def a_copied_database_runs_nothing_until_a_person_says_what_it_is(rooms: Rooms) -> None:
    with rooms.room() as room:
        orders = room.processor("original")
        orders.until_ready()
        room.shop.produce(5)
        until_handled(room, orders, 5)
        copy = rooms.server.copy(room.shop)
        copy.produce(3)
        room.secret("copy", **copy.secret)
        source = {"connection": {"secretRef": {"name": "copy"}}}
        test = room.processor("copied", source=source)
        said = test.until_condition("Ready", "False", "DatabaseCopied")
        assert "confirm-identity" in said["message"]
        reason = 'outbox_state_reason{processor="copied",reason="DatabaseCopied",state="Unavailable"}'
        assert test.metrics()[reason] == 1
        assert copy.query("SELECT count(*) FROM handled") == [(5,)], "nothing runs"
        run_outbox(copy, "outbox", "confirm-identity", "renew")
        test.until_ready()
        test.until("the copy's messages", lambda: copy.query("SELECT count(*) FROM handled") == [(5 + 8,)], within=30)
        room.shop.produce(1)
        until_handled(room, orders, 6)
