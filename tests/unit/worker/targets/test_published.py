"""Which names a record of Kafka's transactions has."""

from __future__ import annotations

import pytest

from outbox_core.message import Batch, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_worker.targets.librdkafka.published import MOST_HELD, Published


def test_names_of_fresh_messages_that_may_be_held_are_the_latest_and_do_not_add_up():
    fresh = {f"5:{n}:0": Checkpoint(5, n) for n in range(10)}
    found = Published(fresh, dict.fromkeys(["5:3:0", *(f"4:{n}:0" for n in range(MOST_HELD + 5))]))
    for _ in range(3):
        found.held = found.as_held()
        assert list(found.held) == [*(f"4:{n}:0" for n in range(5, MOST_HELD + 5)), *fresh]


WITHOUT_ID = Message(5, 3, "5:3", "Placed", "shop", "k", '{"n": 1}', None, None)
"""Its place is its id, as that of each other one that ever has this place."""


def one(message):
    return Batch(Checkpoint(5, 2), message.checkpoint, (message,), 1, full=False)


@pytest.mark.parametrize(
    "other",
    [
        WITHOUT_ID._replace(data='{"n": 2}'),
        WITHOUT_ID._replace(data=None),
        WITHOUT_ID._replace(partition_key=None),
        WITHOUT_ID._replace(message_type="Paid"),
        WITHOUT_ID._replace(metadata="{}"),
        WITHOUT_ID._replace(message_id="m-1"),
    ],
)
def test_another_message_at_a_place_of_a_published_one_is_not_taken_for_it(other):
    """A database that was set back gives a place again; where messages have no id, what they say tells them apart."""
    published = Published().with_batch(one(WITHOUT_ID), [WITHOUT_ID])
    assert published.left_of(one(WITHOUT_ID)) == []
    assert published.left_of(one(other)) == [other]
