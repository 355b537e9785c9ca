"""Which names a record of Kafka's transactions has."""

from __future__ import annotations

from outbox_core.progress.checkpoint import Checkpoint
from outbox_worker.targets.librdkafka.published import MOST_HELD, Published


def test_names_of_fresh_messages_that_may_be_held_are_the_latest_and_do_not_add_up():
    fresh = {f"5:{n}:0": Checkpoint(5, n) for n in range(10)}
    found = Published(fresh, dict.fromkeys(["5:3:0", *(f"4:{n}:0" for n in range(MOST_HELD + 5))]))
    for _ in range(3):
        found.held = found.as_held()
        assert list(found.held) == [*(f"4:{n}:0" for n in range(5, MOST_HELD + 5)), *fresh]
