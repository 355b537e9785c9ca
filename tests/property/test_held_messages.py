"""Whatever messages fail, however often: with blocks Key every key keeps its order, and no other key waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import HandlerError
from outbox_core.message import Batch, Held
from outbox_core.processor import outcomes
from outbox_core.processor.failing import Action
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import Policy, ProcessorState, Step
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import Blocks, CircuitBreaker, Delivery, Retry, WhenExhausted

KEYS = 4
ATTEMPTS = 4


def pair(number):
    return Checkpoint(10, number)


@dataclass
class Row:
    """A held message as the table has it."""

    number: int
    behind: bool
    attempts: int = 0
    due: float = 0.0


@dataclass
class PartitionRunner:
    """The database in memory, and a partition runner that works on it as `handling.py` does."""

    total: int
    size: int
    failures: dict[int, int]
    """How often each message fails before it is mended."""
    when: WhenExhausted = WhenExhausted.DEAD_LETTER
    now: float = 0.0
    handled: list[int] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    steps: int = 0

    def blocked(self, number):
        key = number % KEYS
        return any(row.number % KEYS == key for row in self.held) or any(dead % KEYS == key for dead in self.dead)

    def run(self):
        delivery = Delivery(
            batch_size=self.size, blocks=Blocks.KEY, when_exhausted=self.when,
            retry=Retry(max_attempts=ATTEMPTS, jitter=0), circuit_breaker=CircuitBreaker(),
        )  # fmt: skip
        policy = Policy(delivery)
        lease = outcomes.HeldLease(0, 1, UUID(int=1))
        state = ProcessorState(Step.FETCH, 0.0, lease=lease, stored=pair(0), cursor=pair(0))
        while not (state.cursor == pair(self.total) and state.step is Step.FETCH and state.held_due == float("inf")):
            self.steps += 1
            assert self.steps < 20_000, "it does not end"
            self.now = max(self.now, state.due)
            state = decide_next(state, self.perform(state), self.now, policy, 0.5)
        return state

    def perform(self, state):
        match state.step:
            case Step.FETCH:
                return outcomes.Fetched(self.fetch(state))
            case Step.HANDLE | Step.HOLD_BATCH:
                return self.handle(state)
            case Step.TAKE_HELD:
                return self.take(state)
            case Step.HANDLE_HELD:
                return self.handle_held([each.checkpoint.position for each in state.batch.held])
            case Step.FAIL_HELD:
                return self.fail_held(state)
            case Step.PREPARE:
                return outcomes.Prepared()
            case _:
                raise AssertionError(state.step)

    def fetch(self, state):
        after = state.cursor.position
        numbers = range(after + 1, min(self.total, after + (state.limit or self.size)) + 1)
        excluded = tuple(pair(n) for n in numbers if self.blocked(n)) if state.blocking else ()
        assert len(excluded) == sum(map(self.blocked, numbers)), "a partition runner must know that a key is blocked"
        count = len(numbers)
        return Batch(
            state.cursor, pair(after + count), (), count, full=count == self.size, matched_count=count - len(excluded),
            excluded=excluded,
        )  # fmt: skip

    def attempt(self, numbers):
        """Handle all or none."""
        failing = [n for n in numbers if self.failures.get(n, 0) > 0]
        if failing:
            if len(numbers) == 1:
                self.failures[numbers[0]] -= 1
            return outcomes.Failed(HandlerError("no"))
        self.handled += numbers
        return None

    def handle(self, state):
        batch = state.batch
        numbers = range(batch.after.position + 1, batch.examined.position + 1)
        mine = [n for n in numbers if pair(n) not in batch.excluded]
        if state.step is Step.HANDLE and (failed := self.attempt(mine)):
            return failed
        if state.decision is not None:
            (failing,) = mine
            self.end(Row(failing, behind=False), state.decision)
        self.held += [Row(n, behind=True) for n in numbers if pair(n) in batch.excluded]
        return outcomes.Stored(batch.examined, len(mine))

    def end(self, row, decision):
        match decision.action:
            case Action.HOLD:
                row.attempts, row.due = (
                    decision.attempts,
                    self.now + (float("inf") if decision.wait is None else decision.wait),
                )
                self.held.insert(0, row)
            case Action.DEAD_LETTER:
                self.dead.append(row.number)
            case Action.SKIP:
                self.skipped.append(row.number)
            case _:
                raise AssertionError(decision)
        self.held.sort(key=lambda each: each.number)

    def take(self, state):
        heads = [row for row in self.held if not row.behind and row.due <= self.now]
        chosen = heads + [
            row for head in heads if head.attempts == 0
            for row in self.held if row.behind and row.number % KEYS == head.number % KEYS
        ]  # fmt: skip
        chosen = sorted(chosen, key=lambda each: each.number)[: state.held_limit or self.size]
        if not chosen:
            due = [row.due for row in self.held if not row.behind and row.due < float("inf")]
            return outcomes.HeldTaken(None, min(due) - self.now if due else None, bool(self.held or self.dead))
        held = tuple(Held(pair(row.number), str(row.number % KEYS), str(row.number), row.attempts) for row in chosen)
        batch = Batch(state.cursor, state.cursor, (), len(held), full=True, matched_count=len(held), held=held)
        return outcomes.HeldTaken(batch, 0.0, blocking=True)

    def handle_held(self, numbers):
        if failed := self.attempt(numbers):
            return failed
        self.held = [row for row in self.held if row.number not in numbers]
        self.advance()
        return outcomes.HeldHandled(len(numbers))

    def fail_held(self, state):
        number = state.batch.held[0].checkpoint.position
        row = next(each for each in self.held if each.number == number)
        self.held.remove(row)
        self.end(row, state.decision)
        self.advance()
        return outcomes.HeldFailed()

    def advance(self):
        for key in range(KEYS):
            first = next((row for row in self.held if row.number % KEYS == key), None)
            if first is not None and first.behind and not any(dead % KEYS == key for dead in self.dead):
                first.behind, first.due = False, self.now


BAD = st.dictionaries(st.integers(1, 60), st.integers(1, ATTEMPTS + 2), max_size=8)


@given(st.integers(0, 60), st.integers(1, 20), BAD, st.sampled_from([WhenExhausted.DEAD_LETTER, WhenExhausted.SKIP]))
def test_each_key_keeps_its_order_and_no_other_waits(total, size, bad, when):
    runner = PartitionRunner(total, size, dict(bad), when)
    runner.run()
    lost = {number for number, times in bad.items() if number <= total and times >= ATTEMPTS}
    blocked: set[int] = set()
    if when is WhenExhausted.DEAD_LETTER:
        first_dead = {key: min(n for n in lost if n % KEYS == key) for key in {n % KEYS for n in lost}}
        blocked = {n for n in range(1, total + 1) if n % KEYS in first_dead and n >= first_dead[n % KEYS]}
        assert sorted(runner.dead) == sorted(first_dead.values())
    else:
        assert sorted(runner.skipped) == sorted(lost)
    assert sorted(runner.handled) == [n for n in range(1, total + 1) if n not in blocked | lost]
    for key in range(KEYS):
        mine = [number for number in runner.handled if number % KEYS == key]
        assert mine == sorted(mine)
