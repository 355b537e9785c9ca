"""A target outside the database that does not answer within `delivery.timeout`."""

from __future__ import annotations

import signal
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from typing_extensions import override

from outbox_core.errors import OutboxError
from outbox_core.message import Batch, Message
from outbox_core.ports import OutsideTransaction
from outbox_core.progress.checkpoint import Checkpoint
from outbox_worker.engine.effects import Effects
from outbox_worker.shutdown import Shutdown, Waker


class Silent(OutsideTransaction):
    """Takes messages and confirms none."""

    @override
    def check(self) -> None:
        return

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        time.sleep(20)
        raise AssertionError("nothing ended it")


@pytest.fixture
def shutdown():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM)}
    yield Shutdown(Waker(), 1.0)
    for number, handler in before.items():
        signal.signal(number, handler)


def deliver(shutdown: Shutdown, count: int) -> OutboxError:
    """Hand so many messages over; return what is said of it."""
    context: Any = SimpleNamespace(
        ownership=None,
        shutdown=shutdown,
        throttle=SimpleNamespace(begin=lambda _: None),
        config=SimpleNamespace(delivery=SimpleNamespace(timeout=timedelta(seconds=0.2))),
        target=Silent(),
    )
    messages = tuple(Message(100, n, f"m-{n}", "T", "shop", "k", "{}", None, None) for n in range(1, count + 1))
    batch = Batch(Checkpoint(0, 0), messages[-1].checkpoint, messages, count, full=True)
    with pytest.raises(OutboxError) as caught:
        Effects(context).deliver(batch, 1)
    return caught.value


def test_it_is_to_blame_where_it_confirms_not_even_one_message(shutdown):
    error = deliver(shutdown, 1)
    assert error.reason == "TargetUnavailable"
    assert "did not confirm one message within delivery.timeout" in str(error)


def test_of_several_the_batch_may_be_too_large(shutdown):
    assert deliver(shutdown, 2).reason == "HandlerTimeout"


def test_asked_to_stop_neither_is(shutdown):
    signal.raise_signal(signal.SIGTERM)
    shutdown._deadline = time.monotonic() + 0.1
    assert deliver(shutdown, 1).reason == "Draining"
