"""What one process may hand to its target, after the target asked for a pause."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from outbox_core.breaker import PAUSE
from outbox_core.errors import HandlerError, TransientError
from outbox_core.message import Batch, Held
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_core.report import Reason, WorkerState
from outbox_core.retry import LONGEST_ASKED
from outbox_core.spec import Delivery, Retry
from outbox_worker.engine.throttle import Throttle

ONE = Batch(BEGINNING, Checkpoint(10, 1), (), 1, full=False, matched_count=1)
NOW = 1000.0


def busy(asked, reason=Reason.TARGET_UNAVAILABLE):
    return TransientError("429", reason=reason, classes=("Http429",), retry_after=asked)


def after(*errors, retry=None):
    throttle = Throttle(Delivery(retry=retry or Retry()))
    for error in errors:
        throttle.fail(error, ONE, NOW)
    return throttle


def test_nothing_is_handed_over_before_the_target_asked_for_it():
    throttle = after(busy(30.0), busy(10.0))
    obstacle = throttle.find_obstacle(NOW + 1.0)
    assert obstacle is not None
    assert (obstacle.seconds, obstacle.reason) == (29.0, Reason.TARGET_UNAVAILABLE)
    assert "asked" in obstacle.message
    assert throttle.find_obstacle(NOW + 30.0) is None


def test_no_longer_than_a_message_would_wait():
    obstacle = after(busy(1e9)).find_obstacle(NOW)
    assert obstacle is not None
    assert obstacle.seconds == LONGEST_ASKED


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        pytest.param(busy(None), None, id="it asked for nothing"),
        pytest.param(busy(30.0, Reason.AUTHENTICATION_FAILED), None, id="a new token may be there at once"),
        pytest.param(busy(30.0), Retry(counted=["Http429"]), id="it is counted as the message's fault"),
        pytest.param(HandlerError("no", retry_after=30.0), None, id="the message's own wait"),
    ],
)
def test_others_go_on(error, retry):
    assert after(error, retry=retry).find_obstacle(NOW + 1.0) is None


def test_an_open_breaker_says_what_the_target_last_failed_with():
    down, silent = (TransientError(said, reason=Reason.TARGET_UNAVAILABLE) for said in ("it is down", "it is silent"))
    obstacle = after(*[down] * 9, silent).find_obstacle(NOW)
    assert obstacle is not None
    assert obstacle.reason is Reason.CIRCUIT_OPEN
    assert obstacle.message.endswith("it last failed with: it is silent")
    key_after_key = Throttle(Delivery())
    key_after_key.fail_messages([str(number) for number in range(2000)], NOW, more=True)
    obstacle = key_after_key.find_obstacle(NOW)
    assert obstacle is not None
    assert obstacle.message.endswith("now and then")


@pytest.mark.parametrize(("again", "wait"), [(False, 20.0), (True, PAUSE)])
def test_behind_an_outage_a_message_that_fails_by_itself_opens_the_breaker_once(again, wait):
    """One that stops its partition is the only probe there is: that it fails again is no news of the target."""
    throttle = after(*[TransientError("it is down", reason=Reason.TARGET_UNAVAILABLE)] * 10)
    over = NOW + 10.0
    assert throttle.find_obstacle(over) is None, "a probe"
    throttle.fail(HandlerError("bad"), ONE, over, again=again)
    obstacle = throttle.find_obstacle(over)
    assert obstacle is not None
    assert obstacle.seconds == wait


@pytest.mark.parametrize("step", [Step.HANDLE, Step.ISOLATE, Step.HANDLE_HELD])
def test_what_was_read_before_the_pause_is_read_again_after_it(step):
    """A person may skip or drop a message while a pause lasts for hours."""
    held = (Held(Checkpoint(10, 1), "key", "message"),) if step is Step.HANDLE_HELD else ()
    batch = replace(ONE, held=held)
    state = ProcessorState(step, NOW, WorkerState.ACTIVE, batch=batch, held_due=NOW if held else inf)
    pause = after(busy(30.0)).find_pause(NOW + 1.0)
    assert pause is not None
    state = decide_next(state, pause, NOW + 1.0, Policy(Delivery()), 0.0)
    assert (state.step, state.batch, state.due) == (Step.FETCH, None, NOW + 30.0)
    assert (state.state, state.reason) == (WorkerState.RETRYING, Reason.TARGET_UNAVAILABLE)
    assert state.held_due == (NOW + 30.0 if held else inf)
