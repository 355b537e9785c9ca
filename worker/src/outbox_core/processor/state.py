"""The state of one processor (or one partition of it): what is to be done next, and what a decision may look at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import TYPE_CHECKING, Final, NamedTuple

from outbox_core.errors import TransientError
from outbox_core.report import Reason, WorkerState
from outbox_core.spec import Mode

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch
    from outbox_core.processor import outcomes
    from outbox_core.processor.claimed_batch import ClaimedBatch
    from outbox_core.processor.failing import Failure, FailureDecision, PoisonSearch
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Delivery

SETTLED_LOOKS: Final = 7
"""Looks in vain, in about a second, after which what was written before them is visible, if it was committed."""
_REST: Final = 4.5
"""Seconds more until the next look while the source's server writes nothing."""
STANDBY_POLL: Final = 1.0
"""Longest wait of a standby between two looks at the lease: a takeover takes the lease and less than this."""


class Step(StrEnum):
    """What the loop does next."""

    PREPARE = "prepare"
    """Connect; check schema and identity."""
    CLAIM = "claim"
    REVIEW = "review"
    """Carry out a person's decision, if one was given; see whether a conflict is open."""
    CHECK_TARGET = "check target"
    ACQUIRE = "acquire"
    LOAD = "load"
    FETCH = "fetch"
    HANDLE = "handle"
    """Transactional: handle and store in one transaction. AtLeastOnce: check the lease and deliver."""
    ISOLATE = "isolate"
    """Handle a batch in parts: what fails is found and held, the rest gets through."""
    STORE = "store"
    """Store a checkpoint alone, in its own transaction."""
    HOLD_BATCH = "hold batch"
    """Pass the batch without handling any of it: all that is in it is held, dead or skipped."""
    TAKE_HELD = "take held"
    """See which held messages are to be tried now."""
    HANDLE_HELD = "handle held"
    FAIL_HELD = "fail held"
    """Write down what becomes of a held message that failed."""
    CONFIRM = "confirm"
    """Ask the contract again, without effect, about a transaction that was lost."""
    RECORD = "record"
    """Report a refusal in its own transaction; if a person must decide, give the lease back."""
    HOLD = "hold"
    """Attempts ran out: keep the lease, handle nothing."""
    PARK = "park"
    """Mode Partitioned: another process shall own this partition."""
    RELEASE = "release"
    """Mode Partitioned: give the partition's lease back between two batches, so that another can take it."""
    DEFER = "defer"
    """Competing: the message that fails leaves its batch."""
    END = "end"
    """Give back what is held and end the process."""


# Tuples, not properties of a step: the loop asks several times for each batch.
NEEDS_LEASE: Final = (
    Step.LOAD, Step.FETCH, Step.HANDLE, Step.ISOLATE, Step.HOLD, Step.HOLD_BATCH, Step.TAKE_HELD, Step.HANDLE_HELD,
    Step.FAIL_HELD,
)  # fmt: skip
"""Not worth starting without the lease. What was started already is refused by the contract."""
NEEDS_CLAIM: Final = (Step.REVIEW, Step.CHECK_TARGET, Step.ACQUIRE, Step.PARK, *NEEDS_LEASE)
"""Not worth doing once the heartbeat was told that the claim is another's."""
CAN_YIELD: Final = (Step.REVIEW, Step.CHECK_TARGET, Step.ACQUIRE, Step.FETCH, Step.HOLD, Step.TAKE_HELD)
"""Nothing is in hand: the partition may go to another process from here."""
_RESTS: Final = (*CAN_YIELD, Step.HANDLE)
USES_TARGET: Final = (Step.FETCH, Step.TAKE_HELD)
"""Leads to messages being handed to the target, unless its breaker or the rate forbids it."""
HANDS_OVER: Final = (Step.HANDLE, Step.HANDLE_HELD, Step.ISOLATE)
"""Messages are in hand, and go to the target now, unless it asked for a pause."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What of the resource the decisions depend on."""

    delivery: Delivery
    bisects: bool = True
    """A failing batch is halved until the message that fails is alone (engine Worker)."""
    isolates: bool = False
    """The messages of a batch that fail can be found and the others handled in one step (effects in a database)."""

    @property
    def is_consumer(self) -> bool:
        """Mode Competing: no lease, each batch names its owner."""
        return self.delivery.mode is Mode.COMPETING

    @property
    def poll_interval(self) -> float:
        """Longest idle wait."""
        return self.delivery.poll_interval.total_seconds()

    @property
    def standby_poll(self) -> float:
        """A standby looks more often than the lease lasts."""
        return min(STANDBY_POLL, self.delivery.lease_duration.total_seconds() / 3)


@dataclass(frozen=True, slots=True)
class Stopped:
    """Attempts ran out at one message, or at a batch.

    Attributes:
        place: of the message, as a person names it; None: not known.
        pair: the checkpoint before it; None in mode Competing.
        unnamed: the batch of that one message, where looking up its place failed.

    """

    place: str | None
    message: str
    pair: Checkpoint | None = None
    unnamed: Batch | None = None


class ProcessorState(NamedTuple):
    """Everything a decision may look at.

    A named tuple, because each decision makes one: with these many fields a dataclass takes seven times as long.

    Attributes:
        step: what is to be done, not before `due`.
        state: what is told to people, with `reason` and `message`.
        lease: held by this process, as far as it knows; the database decides.
        stored: the checkpoint as this process believes it stored; what the next store expects.
        cursor: how far was examined; ahead of `stored` while nothing matches.
        batch: in hand.
        begun: AtLeastOnce: the target began to take the batch in hand before its turn.
        delivered: AtLeastOnce: the batch in hand is with the broker, its checkpoint not yet stored.
        following: the batches behind the one in hand that the target began to take, in order.
        look_by: until when more batches may follow before the source is looked at, and what else may be due.
        doubt: a transaction whose connection broke.
        refusal: told by the contract and not recorded yet.
        attempt: failures of the batch in hand that count; 0 when the last one succeeded.
        failures: faults in a row that do not count as attempts.
        idle: looks in a row that found nothing.
        saw_all: the last of them saw everything that was committed by then.
        stopped: attempts ran out: where, and what is told about it.
        given_up: the place of a message that a person gave up: if it fails once more, it is a dead letter.
        limit: most messages in the next batch, while the one that fails is looked for; None: as the resource says.
        search_end: the end of the batch that failed; it is looked for up to here.
        decision: what becomes of the message that failed alone; being written down.
        failed: of the batch in hand, messages that failed alone and are to be held with its checkpoint.
        block: how many messages of a batch are tried at once, because some failed lately; None: all.
        held_block: the same for held messages.
        owed: seconds of work that fresh messages have ahead of them before one that failed is tried again (`turns.py`).
        turn_began: when fresh messages were taken, or held ones were sought.
        poison_search: former owners died here: ever fewer messages at a time.
        blocking: later messages of some key must wait: each batch is looked through for them.
        held_due: when held messages are to be looked at, in mode Competing what is to be tried again, delayed, or
            another consumer's; inf: there is none that is due by itself.
        held_limit: most held messages in the next batch of them; None: as many as in any other.
        forgiven: the handler changed: what was given up is tried again when the partition is loaded.
        start_from_used: the start was computed from the resource's startFrom when this process loaded it.
        unstored_rows: rows examined since the checkpoint was stored, since the time `unstored_since`.
        joined: mode Competing: this process is one of the processor's consumers; it has no lease.
        claimed: mode Competing: what this process has taken, of which `batch` is handled; `after` is how far it is.
        sifted: mode Competing: what came of the batch that is delivered, where some of it failed.
        failure: mode Competing: why the first message of the batch shall leave what was taken.
        resume: mode Competing: when more may be taken, once this is handed back.

    """

    step: Step
    due: float
    state: WorkerState = WorkerState.STARTING
    reason: Reason = Reason.STARTING
    message: str = ""
    lease: outcomes.HeldLease | None = None
    stored: Checkpoint | None = None
    cursor: Checkpoint | None = None
    batch: Batch | None = None
    begun: bool = False
    delivered: bool = False
    following: tuple[Batch, ...] = ()
    look_by: float = 0.0
    doubt: outcomes.CommitUnknown | None = None
    refusal: outcomes.Rejected | None = None
    attempt: int = 0
    failures: int = 0
    idle: int = 0
    saw_all: bool = False
    stopped: Stopped | None = None
    given_up: str | None = None
    limit: int | None = None
    search_end: Checkpoint | None = None
    decision: FailureDecision | None = None
    failed: tuple[Failure, ...] = ()
    block: int | None = None
    held_block: int | None = None
    owed: float = 0.0
    turn_began: float = 0.0
    poison_search: PoisonSearch | None = None
    blocking: bool = False
    held_due: float = inf
    held_limit: int | None = None
    forgiven: bool = False
    start_from_used: bool | None = None
    unstored_rows: int = 0
    unstored_since: float = 0.0
    joined: bool = False
    claimed: ClaimedBatch | None = None
    sifted: outcomes.Sifted | None = None
    failure: OutboxError | None = None
    resume: float = 0.0

    @property
    def owns(self) -> bool:
        """What this process handles is its own, as far as it knows."""
        return self.lease is not None or self.joined

    @property
    def awaits_messages(self) -> bool:
        """Nothing is in hand and nothing is wrong: a new message could be handled at once."""
        return self.step in USES_TARGET and self.state is WorkerState.ACTIVE and self.owns

    @property
    def is_settled(self) -> bool:
        """The next look in vain will be the last one before the source's server writes something."""
        return self.idle >= SETTLED_LOOKS - 1

    @property
    def due_at_rest(self) -> float:
        """When the step is due as long as the source's server writes nothing: no message can have come meanwhile.

        What was written before may become visible later, for a commit may wait for a standby: that is looked for,
        unless no transaction was in progress at the last look.

        Not put off are held messages, and a place that is to be stored.
        """
        certain = self.awaits_messages and (self.idle >= SETTLED_LOOKS or (self.idle > 0 and self.saw_all))
        if self.step is not Step.FETCH or not certain or self.unstored_rows:
            return self.due
        return max(self.due, min(self.due + _REST, self.held_due))

    @property
    def rests(self) -> bool:
        """Before the step begins, the partition may be taken away: what was only read is read again elsewhere."""
        return (self.step in _RESTS and not self.begun) or (self.step is Step.STORE and not self.delivered)

    @property
    def is_last_work(self) -> bool:
        """Asked to stop, but this step is still to be done: it saves a repetition, or tells what was refused."""
        return self.state is WorkerState.DRAINING and (self.begun or self.step in (Step.STORE, Step.RECORD))


def initial_state(now: float) -> ProcessorState:
    """Before anything was tried."""
    return ProcessorState(step=Step.PREPARE, due=now)


def without_ownership(state: ProcessorState) -> ProcessorState:
    """Forget what is only true for an owner. `stopped` stays: the message is as bad for the next epoch."""
    return state._replace(
        lease=None,
        joined=False,
        stored=None,
        cursor=None,
        batch=None,
        claimed=None,
        sifted=None,
        failure=None,
        delivered=False,
        doubt=None,
        refusal=None,
        unstored_rows=0,
        idle=0,
        limit=None,
        search_end=None,
        decision=None,
        poison_search=None,
        blocking=False,
        held_due=inf,
        held_limit=None,
    )


def lease_of(state: ProcessorState) -> outcomes.HeldLease:
    """Return the lease of a state in a step that only owners do."""
    if state.lease is None:
        raise TransientError("a step for owners without a lease", reason=Reason.INTERNAL_ERROR)
    return state.lease


def batch_of(state: ProcessorState) -> Batch:
    """Return the batch of a state in a step about one."""
    if state.batch is None:
        raise TransientError("no batch is in hand", reason=Reason.INTERNAL_ERROR)
    return state.batch
