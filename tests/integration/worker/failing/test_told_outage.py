"""What a worker says of itself in an outage that looks like failing messages: one thing, until a message is handled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.failing import Failing
from tests.support.worker import PYTHON_HANDLER, SQL_TARGET

COMPETING: dict[str, Any] = {"mode": "Competing", "competing": {}}
ATTEMPTS = (
    "SELECT coalesce((SELECT sum(attempts) FROM outbox.held_messages), 0) "
    "+ coalesce((SELECT sum(attempts) FROM outbox.competing_retries), 0)"
)


def count_attempts(failing):
    return failing.connection.execute(ATTEMPTS).fetchone()[0]


@pytest.mark.parametrize(
    ("partitioned", "delivery"),
    [
        pytest.param(False, {"blocks": "Nothing", "batchSize": 1}, id="one at a time", marks=pytest.mark.nightly),
        pytest.param(True, {"blocks": "Key"}, id="by key, in partitions"),
        pytest.param(
            False, {"blocks": "Key", "guarantee": "AtLeastOnce"}, id="at least once", marks=pytest.mark.nightly
        ),
        pytest.param(False, COMPETING, id="competing"),
        pytest.param(
            False, COMPETING | {"guarantee": "AtLeastOnce"}, id="competing, at least once", marks=pytest.mark.nightly
        ),
    ],
)
def test_it_is_told_steadily_while_messages_are_probes_twice_a_second(outbox, workers, partitioned, delivery):
    failing = Failing(outbox)
    failing.connection.execute("ALTER TABLE handled RENAME TO away")
    config = failing.config(
        SQL_TARGET, partitioned=partitioned, cursor=None if "competing" in delivery else "TransactionOrder",
        retry={"maxAttempts": 1000, "initialBackoff": "50ms", "maxBackoff": "100ms"},
        circuitBreaker={"failures": 2, "openFor": "15s"}, **delivery,
    )  # fmt: skip
    worker = workers.start(config, outbox.database.uri(), handler=PYTHON_HANDLER)
    failing.produce(10)
    worker.wait_state("Retrying", "CircuitOpen", 40)
    worker.wait_for("each partition says so", lambda r: r.message.startswith("messages of 2 keys or more failed"))
    tried = count_attempts(failing)
    seen = worker.watch(3.0)
    failing.produce(3, start=10)
    seen += worker.watch(3.0)
    told = {(each.circuit, each.state.value, each.reason.value, each.message) for each in seen}
    assert len(told) == 1, told
    assert seen[0].circuit == "Open"
    assert count_attempts(failing) >= tried + 4, "it is probed all the while"

    failing.connection.execute("ALTER TABLE away RENAME TO handled")
    worker.wait_for("the first good probe closes it", lambda r: r.circuit == "Closed", 5)
    failing.wait_handled(set(range(13)), 20)
    worker.wait_state("Active")


def test_after_an_outage_a_message_that_stops_its_partition_is_tried_at_its_own_pace(outbox, workers):
    """Each attempt of it is a probe, and that it fails again is its own trouble: the wait is not doubled for it."""
    failing = Failing(outbox)
    failing.break_at(0)
    failing.connection.execute("ALTER TABLE handled RENAME TO away")
    config = failing.config(
        SQL_TARGET, partitioned=False, whenExhausted="DeadLetter", blocks="Partition",
        circuitBreaker={"failures": 1, "openFor": "2s"},
        retry={"maxAttempts": 4, "initialBackoff": "50ms", "maxBackoff": "100ms", "forever": ["42P01"]},
    )  # fmt: skip
    worker = workers.start(config, outbox.database.uri())
    failing.produce(5)
    worker.wait_state("Retrying", "CircuitOpen", 40)
    failing.connection.execute("ALTER TABLE away RENAME TO handled")
    failing.wait_dead(1, 20)
    failing.wait_handled({1, 2, 3, 4})
