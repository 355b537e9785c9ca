"""PURE: the life of a consumer in mode Competing, as a state machine like `outbox_core.processor`'s.

    PREPARE -> CLAIM -> REVIEW -> CHECK_TARGET -> LOAD -> FETCH -> HANDLE -> FETCH -> ...

LOAD joins the processor and hands back whatever this process may still have in its name; FETCH takes a batch, or the
next piece of the one in hand. No consumer owns the processor: each batch names its owner and the number of its attempt,
and whoever is not that any more is told so when it completes the batch. A batch that fails is handled in smaller
pieces until the message that fails is alone; that one leaves the batch (DEFER), the rest goes on. While the target is
down nothing is kept: what is in hand is handed back (RELEASE), and nothing is taken until its breaker lets it through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final, TypeAlias, assert_never

from outbox_core import failing, retry
from outbox_core import happening as h
from outbox_core.claiming import decide_after_claim
from outbox_core.errors import HandlerError
from outbox_core.message import Batch
from outbox_core.report import Reason, WorkerState
from outbox_core.spec import WhenExhausted
from outbox_core.state import Step

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from outbox_core.checkpoint import Checkpoint
    from outbox_core.errors import OutboxError
    from outbox_core.snapshot import Snapshot
    from outbox_core.spec import Retry
    from outbox_core.state import Policy

CONTENDED_WAIT: Final = 0.002
"""Another consumer is cutting a batch at this moment, which takes about so long; doubled while that goes on."""
_MOST_DOUBLINGS: Final = 20
_NOBODYS_FAULT: Final = frozenset({Reason.HANDLER_ENDED_TRANSACTION})


@dataclass(frozen=True, slots=True)
class Window:
    """The messages that `upper` sees and `lower` does not."""

    lower: Snapshot
    upper: Snapshot


@dataclass(frozen=True, slots=True)
class Work:
    """A batch in hand.

    Attributes:
        id: of the row that says whose it is.
        lane: priority, 0 to 9; 0 over the outbox.
        attempt: number of this taking; completion is refused to every other.
        window: where its messages are; None: they are listed.
        listed: messages that are tried again, in order of their pairs, each with its failures so far.
        after: done up to here.
        upto: the last message.
        count: messages left; 0: rows that are not among them, or none.
        piece: most messages to handle at once, because a process died over it; None: all.
        deaths: processes that died over its first message, once that was alone.
        aside: positions of the window's delayed messages, which are not in it.

    """

    id: int
    lane: int
    attempt: int
    window: Window | None
    listed: tuple[tuple[Checkpoint, int], ...]
    after: Checkpoint
    upto: Checkpoint
    count: int
    piece: int | None = None
    deaths: int = 0
    aside: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece(Batch):
    """What of a batch is handled at once."""

    work: Work | None = None


class Action(StrEnum):
    """What becomes of a message that failed alone."""

    RETRY = "Retry"
    DEAD_LETTER = "DeadLetter"
    SKIP = "Skip"
    STOP = "Stop"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The action, after so many failures, and for RETRY how many seconds later."""

    action: Action
    attempts: int
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class Joined:
    """The processor is known; `start_from_used`: this consumer just wrote down where it starts."""

    start_from_used: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The first piece of a batch is in hand, or the next piece."""

    piece: Piece


@dataclass(frozen=True, slots=True)
class NothingTaken:
    """There was nothing to take; `contended`: another consumer was cutting; `moved`: only other messages were seen."""

    contended: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """The piece is done and committed, its effects with it if they are transactional; `count` messages."""

    count: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Another consumer has the batch; nothing of this one's was committed."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """The message that failed has left the batch, which is done up to `pair`; None: the verdict is to stop.

    The batch itself may reach further than its last message, so it is not over with that one.
    """

    verdict: Verdict
    pair: Checkpoint | None = None


CompetingHappening: TypeAlias = (
    h.Prepared | h.ClaimAnswered | h.Reviewed | h.TargetReady | h.Delivered | h.Failed | h.OwnershipLost
    | h.TargetChanged | h.StopRequested | h.Throttled | h.Released | Joined | Taken | NothingTaken | Completed | Lost
    | Deferred
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ConsumerState:
    """Everything a decision may look at.

    Attributes:
        step: what is to be done, not before `due`.
        work: the batch in hand, `after` being how far this process is.
        piece: what of it is being handled.
        delivered: AtLeastOnce: the piece is with the target, and not completed yet.
        limit: most messages at once, while one that fails is looked for.
        failure: why the first message of the piece shall leave the batch.
        attempt: failures of the message in hand.
        failures: faults in a row that no message caused.
        idle: looks in a row that found nothing.
        resume: once the batch is handed back, when the next one may be taken.

    """

    step: Step
    due: float
    state: WorkerState = WorkerState.STARTING
    reason: Reason = Reason.STARTING
    message: str = ""
    work: Work | None = None
    piece: Piece | None = None
    delivered: bool = False
    limit: int | None = None
    failure: OutboxError | None = None
    attempt: int = 0
    failures: int = 0
    idle: int = 0
    resume: float = 0.0
    start_from_used: bool | None = None

    @property
    def is_last_work(self) -> bool:
        """Asked to stop, but this is still to be done: it saves a repetition."""
        return self.state is WorkerState.DRAINING and self.step is Step.STORE


def choose_lane(heads: Mapping[int, datetime], ageing: timedelta) -> int:
    """Choose the lane of the next batch: the one whose first message has the earliest claim.

    A level of priority is worth `ageing` of waiting: of two messages the less urgent one goes first once it has waited
    longer by `ageing` for each level between them. Nothing waits for ever.

    Args:
        heads: of each lane that has any, when its first message was stored, or its delay was over.
        ageing: more than zero.

    """
    return min(heads, key=lambda lane: (heads[lane] + lane * ageing, lane))


def judge(attempts: int, error: OutboxError, settings: Retry, when_exhausted: WhenExhausted, chance: float) -> Verdict:
    """Say what becomes of a message that failed with `error`, for the `attempts`-th time."""
    decision = retry.decide_retry(attempts, settings, chance, error)
    if not decision.stop and not failing.is_given_up(error):
        return Verdict(Action.RETRY, attempts, decision.delay)
    match when_exhausted:
        case WhenExhausted.STOP:
            return Verdict(Action.STOP, attempts)
        case WhenExhausted.DEAD_LETTER:
            return Verdict(Action.DEAD_LETTER, attempts)
        case WhenExhausted.SKIP:
            return Verdict(Action.SKIP, attempts)
        case WhenExhausted.REQUEUE:
            return Verdict(Action.RETRY, 0, settings.max_backoff.total_seconds())
        case _:
            assert_never(when_exhausted)


def decide_consumer(  # noqa: C901, PLR0911, PLR0912 - a case for each happening; mypy checks that none is missing
    state: ConsumerState, happened: CompetingHappening, now: float, policy: Policy, chance: float
) -> ConsumerState:
    """Decide the next step; arguments as `outbox_core.processor.decide_next`."""
    match happened:
        case h.Prepared():
            return replace(state, step=Step.STORE if state.delivered else Step.CLAIM, due=now)
        case h.ClaimAnswered():
            return decide_after_claim(state, _empty_handed(state), happened, now, chance)
        case h.Reviewed():
            return replace(state, step=Step.CHECK_TARGET, due=now)
        case h.TargetReady():
            return replace(state, step=Step.LOAD, due=now)
        case Joined():
            state = replace(_empty_handed(state), failures=0, start_from_used=happened.start_from_used)
            return replace(state, step=Step.FETCH, due=now, state=WorkerState.ACTIVE, reason=Reason.IDLE, message="")
        case Taken():
            return _after_take(state, happened.piece, now, policy)
        case NothingTaken():
            return _after_nothing(state, happened, now, policy)
        case h.Delivered():
            return replace(state, step=Step.STORE, due=now, delivered=True)
        case Completed():
            return _after_completion(state, now)
        case Lost():
            # Delivered, it may have been completed by a call whose answer was lost: then the rest is still in our name.
            step = Step.RELEASE if state.delivered else Step.FETCH
            return replace(
                _empty_handed(state), step=step, due=now, state=WorkerState.ACTIVE, reason=Reason.LEASE_LOST,
                message="a batch was not completed in time and is another consumer's now; its effects were rolled back "
                "where they are transactional",
            )  # fmt: skip
        case Deferred():
            return _after_deferral(state, happened, now)
        case h.Throttled():
            return _throttled(state, happened, now)
        case h.Released():
            return replace(_empty_handed(state), step=Step.FETCH, due=max(now, state.resume))
        case h.Failed():
            return _after_failure(state, happened.error, now, policy, chance)
        case h.OwnershipLost():
            return replace(
                _empty_handed(state), step=Step.PREPARE, due=now, state=WorkerState.STARTING,
                reason=Reason.LEASE_LOST, message=f"{happened.message}; asking for the claim again",
            )  # fmt: skip
        case h.TargetChanged():
            return replace(state, step=Step.FETCH, due=now, state=WorkerState.ACTIVE) if _holds(state) else state
        case h.StopRequested():
            state = replace(state, due=now, state=WorkerState.DRAINING, reason=Reason.DRAINING, message="asked to stop")
            return state if state.is_last_work and state.failures == 0 else replace(state, step=Step.END)
        case _:
            assert_never(happened)


def _holds(state: ConsumerState) -> bool:
    return state.step is Step.HOLD


def _empty_handed(state: ConsumerState) -> ConsumerState:
    return replace(state, work=None, piece=None, delivered=False, limit=None, failure=None, attempt=0)


def _throttled(state: ConsumerState, throttled: h.Throttled, now: float) -> ConsumerState:
    """The rate is used up: the batch stays in hand. The breaker is open: others may have it."""
    if throttled.reason is not Reason.CIRCUIT_OPEN:
        return replace(state, due=now + throttled.seconds)
    state = replace(state, state=WorkerState.RETRYING, reason=throttled.reason, message=throttled.message)
    return _handed_back(state, now, throttled.seconds)


def _handed_back(state: ConsumerState, now: float, wait: float) -> ConsumerState:
    """Take nothing for so long, and keep nothing from others meanwhile."""
    if state.work is None:
        return replace(state, step=Step.FETCH, due=now + wait)
    return replace(state, step=Step.RELEASE, due=now, resume=now + wait)


def _after_take(state: ConsumerState, piece: Piece, now: float, policy: Policy) -> ConsumerState:
    work = piece.work
    state = replace(state, work=work, piece=piece, idle=0, step=Step.HANDLE, due=now)
    if work is not None and work.piece == 1 and work.deaths >= policy.delivery.retry.max_attempts:
        killed = HandlerError(
            f"{work.deaths} processes in a row died while they handled this message alone", reason=Reason.PROCESS_KILLED
        )
        return replace(state, step=Step.DEFER, failure=killed)
    if state.state is WorkerState.RETRYING and (state.attempt or state.failures):
        return state
    return replace(state, state=WorkerState.ACTIVE, reason=Reason.RUNNING, message="")


def _after_nothing(state: ConsumerState, found: NothingTaken, now: float, policy: Policy) -> ConsumerState:
    idle = 0 if found.moved else state.idle + 1
    wait = 0.0 if found.moved else retry.idle_wait(idle, policy.poll_interval)
    if found.contended:
        wait = min(CONTENDED_WAIT * 2.0 ** min(idle, _MOST_DOUBLINGS), policy.poll_interval)
    state = replace(_empty_handed(state), step=Step.FETCH, due=now + wait, idle=idle)
    if found.contended:
        return state
    state = replace(state, failures=0)
    return replace(state, state=WorkerState.ACTIVE, reason=Reason.IDLE, message="")


def _after_completion(state: ConsumerState, now: float, done_upto: Checkpoint | None = None) -> ConsumerState:
    """Go on behind the piece, or behind `done_upto`, which the database was told."""
    work, piece = state.work, state.piece
    draining = state.state is WorkerState.DRAINING
    state = replace(
        state, piece=None, delivered=False, failure=None, failures=0, attempt=0,
        step=Step.END if draining else Step.FETCH,
    )  # fmt: skip
    state = replace(state, due=now, limit=None if state.limit is None else state.limit * 2)
    if work is None or piece is None:
        return replace(state, work=None, limit=None)
    after = piece.examined if done_upto is None else done_upto
    if after >= work.upto:
        return replace(state, work=None, limit=None)
    done = piece.matched_count
    rest = None if work.piece is None else work.piece * 2
    left = max(0, work.count - done)
    return replace(
        state,
        work=replace(work, after=after, count=left, deaths=0, piece=rest if rest and rest < left else None),
    )


def _after_deferral(state: ConsumerState, deferred: Deferred, now: float) -> ConsumerState:
    verdict = deferred.verdict
    if verdict.action is Action.STOP:
        return replace(
            state, step=Step.HOLD, due=inf, attempt=verdict.attempts, state=WorkerState.STOPPED,
            reason=Reason.ATTEMPTS_EXHAUSTED, failure=None,
            message=f"gave up after {verdict.attempts} attempts: {state.failure}; mend it, then change the resource or "
            "its ConfigMap, or restart the worker",
        )  # fmt: skip
    return _after_completion(state, now, deferred.pair)


def _after_failure(
    state: ConsumerState, error: OutboxError, now: float, policy: Policy, chance: float
) -> ConsumerState:
    settings = policy.delivery.retry
    piece = state.piece
    counts = retry.classify_error(error, settings) is not retry.ErrorKind.OUTSIDE
    if counts and state.step is Step.HANDLE and piece is not None:
        said = replace(state, failures=0, state=WorkerState.RETRYING, reason=error.reason)
        if error.reason in _NOBODYS_FAULT:
            attempt = state.attempt + 1
            decision = retry.decide_retry(attempt, settings, chance, error)
            held = replace(said, attempt=attempt, message=str(error))
            if decision.stop:
                return _after_deferral(replace(held, failure=error), Deferred(Verdict(Action.STOP, attempt)), now)
            return replace(held, step=Step.FETCH, due=now + decision.delay)
        if piece.matched_count > 1:
            looking = f"{error}; looking for the message among {piece.matched_count}"
            return replace(said, step=Step.FETCH, due=now, limit=piece.matched_count // 2, message=looking, attempt=1)
        return replace(said, step=Step.DEFER, due=now, failure=error, message=str(error), attempt=1)
    failures = state.failures + 1
    wait = max(
        retry.infrastructure_backoff(failures, settings, chance), min(error.retry_after or 0.0, retry.LONGEST_ASKED)
    )
    of_target = error.reason in retry.OF_THE_TARGET or isinstance(error, HandlerError)
    busy = state.work is not None and of_target
    told = replace(
        state, failures=failures, state=WorkerState.RETRYING if busy else WorkerState.UNAVAILABLE, reason=error.reason,
        message=str(error),
    )  # fmt: skip
    if busy and state.step is Step.HANDLE:
        return _handed_back(told, now, wait)
    return replace(told if state.delivered else _empty_handed(told), step=Step.PREPARE, due=now + wait)
