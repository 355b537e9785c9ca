"""Whatever messages fail: all before the first are handled once and in order, and it alone uses up the attempts."""

from __future__ import annotations

from math import log2
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import HandlerError
from outbox_core.message import Batch
from outbox_core.processor import outcomes
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import WorkerState
from outbox_core.spec import Delivery, Retry

ATTEMPTS = 3


def pair(number: int) -> Checkpoint:
    return Checkpoint(10, number)


def fetch(after: Checkpoint, limit: int, total: int) -> Batch:
    """Messages 1 to total, without payloads, as target `sql` gets them."""
    count = min(limit, total - after.position)
    return Batch(after, pair(after.position + count), (), count, full=count == limit, matched_count=count)


class Run:
    """A processor over a log in memory, until it stops or nothing is left."""

    def __init__(self, total: int, size: int, bad: set[int], mend_after: int | None = None) -> None:
        delivery = Delivery(batch_size=size, retry=Retry(max_attempts=ATTEMPTS, jitter=0))
        self.policy = Policy(delivery)
        self.handled: list[int] = []
        self.failures: list[tuple[int, int]] = []
        lease = outcomes.HeldLease(0, 1, UUID(int=1))
        state = ProcessorState(Step.FETCH, 0.0, lease=lease, stored=pair(0), cursor=pair(0))
        while state.step is not Step.HOLD and not (state.step is Step.FETCH and state.cursor == pair(total)):
            assert state.cursor is not None
            outcome: outcomes.StepOutcome
            if state.step is Step.FETCH:
                outcome = outcomes.Fetched(fetch(state.cursor, state.limit or size, total))
            else:
                assert state.batch is not None
                numbers = range(state.batch.after.position + 1, state.batch.examined.position + 1)
                mended = mend_after is not None and len(self.failures) >= mend_after
                if bad & set(numbers) and not mended:
                    self.failures.append((numbers[0], len(numbers)))
                    outcome = outcomes.Failed(HandlerError("no"))
                else:
                    self.handled += numbers
                    outcome = outcomes.Stored(state.batch.examined, len(numbers))
            state = decide_next(state, outcome, 0.0, self.policy, 0.5)
        self.state = state


SIZES = st.tuples(st.integers(1, 200), st.integers(1, 70))


@given(SIZES, st.sets(st.integers(1, 200), min_size=1))
def test_the_first_bad_message_ends_alone(sizes, bad):
    total, size = sizes
    first = min(bad)
    run = Run(total, size, bad)
    if first > total:
        assert run.handled == list(range(1, total + 1))
        assert run.failures == []
        return
    assert run.handled == list(range(1, first))
    assert (run.state.state, run.state.attempt) == (WorkerState.STOPPED, ATTEMPTS)
    assert run.failures[-ATTEMPTS:] == [(first, 1)] * ATTEMPTS
    assert len(run.failures) <= ATTEMPTS + log2(size) + 1


@given(SIZES, st.integers(1, 200), st.integers(1, 12))
def test_what_mends_goes_on_in_whole_batches(sizes, bad, mend_after):
    total, size = sizes
    run = Run(total, size, {bad}, mend_after)
    if len(run.failures) < mend_after or run.state.step is Step.HOLD:
        return  # it stopped first, or nothing failed
    assert run.handled == list(range(1, total + 1))
    assert (run.state.limit, run.state.search_end, run.state.attempt) == (None, None, 0)
