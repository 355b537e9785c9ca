"""Trouble with the database: a condition says what to do, and it recovers by itself."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.acceptance.scenarios import Scenarios, recovers, until_handled
from tests.support.cluster import DatabaseServer, namespaces

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
def a_strangers_open_transaction_is_named_and_its_end_awaited(rooms: Rooms) -> None:
    # On a server of its own: the transaction holds back every database of its server, and so would every scenario's.
    with namespaces(rooms.cluster, "stall") as (place,), rooms.room() as lent:
        server = DatabaseServer(rooms.cluster, place)
        room = replace(lent, server=server, shop=server.make())
        stranger = server.make()
        room.secret()
        room.prepare()
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(2)
        until_handled(room, orders, 2)
        orders.until_condition("SourceCurrent", "True")
        with stranger.connect() as connection:
            connection.execute("SET application_name = 'nightly-report'")
            with connection.transaction():
                connection.execute("SELECT pg_current_xact_id()")
                room.shop.produce(3)
                began = time.monotonic()
                said = orders.until_condition("SourceCurrent", "False", "BoundStalled")
                assert time.monotonic() - began <= 10, "seconds from the begin of a stall to the condition"
                assert "nightly-report" in said["message"]
                assert stranger.name in said["message"], "the database, although it is not the processor's own"
                assert len(room.handled()) == 2, "what lies behind an open transaction is not read"
                assert orders.condition("Ready")["status"] == "True"
        until_handled(room, orders, 5)
        orders.until_condition("SourceCurrent", "True", "BoundMoves")
