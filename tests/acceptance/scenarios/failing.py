"""Messages that fail, and a target that does: what status and metrics say, and what a person does about it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.acceptance.scenarios import Scenarios, run_outbox, until_handled

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms

STRICT = "INSERT INTO public.strict SELECT position, partition_key FROM batch ORDER BY position"
scenarios = Scenarios()


@scenarios.add
def a_key_that_waits_behind_its_dead_letter_is_named_and_redriven(rooms: Rooms) -> None:
    with rooms.room() as room:
        shop = room.shop
        shop.query("CREATE TABLE strict (position bigint, key text CONSTRAINT no_bad CHECK (key <> 'bad'))")
        careful = room.processor(
            "careful",
            target={"sql": {"statement": STRICT}},
            delivery={
                "mode": "Partitioned",
                "partitions": {"count": 2},
                "whenExhausted": "DeadLetter",
                "retry": {"never": ["23514"]},
            },
        )
        careful.until_ready()
        shop.produce(3, key="bad")
        shop.produce(3, key="good")
        said = careful.until_condition("MessagesFlow", "False", "KeyBlocked", within=30)
        assert "'bad' behind " in said["message"]
        careful.until("status counts them", lambda: careful.status["failures"].get("held") == 2, within=15)
        failures = careful.status["failures"]
        assert failures["deadLetters"] == 1
        (blocked,) = failures["blockedKeys"]
        assert (blocked["key"], blocked["waitsFor"], blocked["errorClass"]) == ("bad", "Person", "23514")
        careful.until(
            "the other key goes on",
            lambda: shop.query("SELECT key, count(*) FROM strict GROUP BY key") == [("good", 3)],
        )
        metrics = careful.metrics()
        labels = '{processor="careful"}'
        counted = [metrics[f"outbox_{each}{labels}"] for each in ("dead_letters", "held_messages", "blocked_keys")]
        assert counted == [1, 2, 1]

        shop.query("ALTER TABLE strict DROP CONSTRAINT no_bad")
        assert "23514" in run_outbox(shop, "kubectl", "outbox", "dead-letters", "list", "careful")
        run_outbox(shop, "kubectl", "outbox", "redrive", "careful", "--key", "bad", "--reason", "mended", "--yes")
        careful.until("all are handled", lambda: shop.query("SELECT count(*) FROM strict") == [(6,)], within=30)
        in_order = shop.query("SELECT position FROM strict WHERE key = 'bad' ORDER BY ctid")
        assert in_order == sorted(in_order)
        careful.until_condition("MessagesFlow", "True", "AsExpected", within=30)
        assert careful.status["failures"]["deadLetters"] == 0


@scenarios.add_at_night
def an_open_circuit_breaker_is_said_and_closes_again(rooms: Rooms) -> None:
    with rooms.room() as room:
        room.shop.query("ALTER TABLE handled RENAME TO away")
        spared = room.processor(
            "spared",
            delivery={
                "blocks": "Nothing",
                "circuitBreaker": {"failures": 2, "openFor": "15s"},
                "retry": {"initialBackoff": "100ms", "maxBackoff": "1s", "maxAttempts": 1000},
                "batchSize": 1,
                "pollInterval": "100ms",
            },
        )
        spared.until("the table of messages", lambda: room.shop.query("SELECT to_regclass('outbox.messages')")[0][0])
        room.shop.produce(5)
        spared.until_condition("MessagesFlow", "False", "CircuitOpen", within=60)
        # It probes twice a second, and is open to a reader all the while.
        spared.until(
            "the status says so", lambda: spared.status.get("failures", {}).get("circuit") == "Open", within=30
        )
        metric = 'outbox_circuit{phase="Open",processor="spared"}'
        for _ in range(5):
            assert spared.metrics()[metric] == 1
            assert spared.condition("MessagesFlow")["reason"] == "CircuitOpen"
            time.sleep(1)
        room.shop.query("ALTER TABLE away RENAME TO handled")
        until_handled(room, spared, 5)
        spared.until_condition("MessagesFlow", "True", within=30)
        assert spared.status["failures"]["circuit"] == "Closed"
        spared.until_ready()
