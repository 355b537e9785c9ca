"""Outcomes of a step, or events beside it: what `lifecycle.decide_next` is told next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID

    from outbox_core.errors import OutboxError
    from outbox_core.message import Batch
    from outbox_core.processor.claimed_batch import Chunk, Refusal, RefusalDecision
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.stopping import Named
    from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
    from outbox_core.report import Reason, ResourceRef


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease of one partition: epoch and token are what the database compares."""

    partition: int
    epoch: int
    token: UUID


@dataclass(frozen=True, slots=True)
class OpenConflict:
    """A refusal that waits for a person."""

    id: int
    code: int
    expected: Checkpoint | None
    stored: Checkpoint | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Connected; schema and identity are as they must be.

    Attributes:
        crashed: the server recovered from a crash since this partition prepared before. It may hand out again
            transaction ids that it had handed out to transactions that rolled back, and may have lost commits that were
            not waited for: nothing that was learned before means anything.

    """

    crashed: bool = False


@dataclass(frozen=True, slots=True)
class ClaimAnswered:
    """The claim was asked for; `holder` has it now."""

    granted: bool
    holder: ResourceRef | None


@dataclass(frozen=True, slots=True)
class Reviewed:
    """Open conflicts were looked at; `note` says what came of a person's decision that could not be carried out."""

    open: OpenConflict | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class TargetReady:
    """The target can work, as far as one can see without using it."""


@dataclass(frozen=True, slots=True)
class LeaseAnswered:
    """The lease was asked for; None: `pod` has it."""

    lease: HeldLease | None
    pod: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Review:
    """What former owners left: messages held, keys that are blocked, and of what they died.

    Attributes:
        any_held: some message of the partition is held.
        blocking: later messages of some key must wait: each batch has to be looked through for them.
        crash_count: owners in a row that died at the checkpoint.
        poison_crashes: processes that died of the one message they had written down.
        in_flight: how many messages the last owner had written down and died of.

    """

    any_held: bool = False
    blocking: bool = False
    crash_count: int = 0
    poison_crashes: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class Loaded:
    """The stored checkpoint is known; `start_from_used`: it was just computed from the resource's startFrom."""

    pair: Checkpoint
    start_from_used: bool
    review: Review = Review()


@dataclass(frozen=True, slots=True)
class Fetched:
    """The outbox was read.

    Attributes:
        at_once: how far it was examined is stored now, although there is nothing to handle.
        is_last: the worker is to stop, and this batch is to be handled in the same step: after it the loop ends.

    """

    batch: Batch
    at_once: bool = False
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Delivered:
    """AtLeastOnce: the batch's effects are done, its checkpoint is not stored yet.

    Attributes:
        following: the batches behind it that the target began to take meanwhile, in order.

    """

    count: int
    following: tuple[Batch, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    """The checkpoint is committed; with Transactional the effects with it, `count` messages.

    Attributes:
        saw_all: all that is committed now was examined, and no transaction is in progress: a look would be in vain.

    """

    pair: Checkpoint
    count: int = 0
    saw_all: bool = False


@dataclass(frozen=True, slots=True)
class Isolated:
    """Of a batch some messages failed and others were handled.

    Attributes:
        batch: what of it was tried; those that wait behind what failed are excluded.
        failed: the messages that failed alone, and what becomes of them.
        next_block: how many to try at once next time.
        stored: the checkpoint and what becomes of those is committed with the effects; else that is still to be done.

    """

    batch: Batch
    failed: tuple[Failure, ...]
    count: int
    next_block: int
    stored: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """The contract answered something else than 1, or would (`new` None: seen at loading); nothing was committed."""

    answer: StoreAnswer
    expected: Checkpoint | None
    new: Checkpoint | None
    stored: Checkpoint | None


@dataclass(frozen=True, slots=True)
class CommitUnknown:
    """The connection broke inside the transaction that was to store `new`, or something ended it during COMMIT.

    `committing`: during COMMIT, so it may be committed; else it is rolled back, and only ownership is in question.
    """

    expected: Checkpoint | None
    new: Checkpoint
    committing: bool
    error: OutboxError


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """Asked again about a lost transaction: it was not committed, and this process is still the owner."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The refusal is in the database under this number."""

    conflict_id: int


@dataclass(frozen=True, slots=True)
class HeldTaken:
    """Held messages were looked at: these are to be tried now, or in so many seconds there is one (None: never)."""

    batch: Batch | None
    next_in: float | None
    blocking: bool


@dataclass(frozen=True, slots=True)
class HeldHandled:
    """Held messages are handled, and held no more."""

    count: int


@dataclass(frozen=True, slots=True)
class HeldFailed:
    """What becomes of a held message that failed is written down."""


@dataclass(frozen=True, slots=True)
class HeldSorted:
    """Of several held messages `handled` many are handled, and what becomes of those that failed is written down.

    `next_block`: how many to try at once next time. `more`: there was no time for all of them.
    """

    handled: int
    failed: tuple[Failure, ...]
    next_block: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class HeldChanged:
    """Held messages are not as this process last saw them: a user redrove or dropped some."""


@dataclass(frozen=True, slots=True)
class Throttled:
    """Nothing may be tried for so many seconds: the target asked for a pause, or its breaker is open.

    Or the rate is used up, or former owners are not shut out yet: then the reason is RUNNING.
    """

    seconds: float
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The step could not be done; `message` is the one that failed alone, where it is known."""

    error: OutboxError
    message: Named | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """Stopped at a message, and looked: a person gave it up, or nothing is decided yet; or it was named at last."""

    given_up: bool
    named: Named | None = None


@dataclass(frozen=True, slots=True)
class OwnershipLost:
    """The heartbeat was told that claim or lease are another's, or could not be renewed in time."""

    message: str


@dataclass(frozen=True, slots=True)
class SourceMoved:
    """The source's server wrote something: perhaps a message. `useless` times in a row before this it was none."""

    useless: int


@dataclass(frozen=True, slots=True)
class HandlerChanged:
    """What the target is made of was changed (the ConfigMap with the handler)."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """Mode Partitioned: this process shall own the partition."""


@dataclass(frozen=True, slots=True)
class Revoked:
    """Mode Partitioned: another process shall own the partition."""


@dataclass(frozen=True, slots=True)
class Released:
    """The partition's lease was given back."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """SIGTERM."""


HeldOutcome = HeldTaken | HeldHandled | HeldFailed | HeldSorted | HeldChanged
"""Outcomes of a step that is about what is held."""
StepOutcome = (
    Prepared
    | ClaimAnswered
    | Reviewed
    | TargetReady
    | LeaseAnswered
    | Loaded
    | Fetched
    | Delivered
    | Stored
    | Isolated
    | Rejected
    | CommitUnknown
    | NotCommitted
    | Recorded
    | HeldOutcome
    | Throttled
    | Failed
    | Decision
    | OwnershipLost
    | SourceMoved
    | HandlerChanged
    | Assigned
    | Revoked
    | Released
    | StopRequested
)


@dataclass(frozen=True, slots=True)
class Joined:
    """The processor is known; `start_from_used`: this consumer just wrote down where it starts."""

    start_from_used: bool


@dataclass(frozen=True, slots=True)
class Taken:
    """The first chunk of a batch is in hand, or the next chunk.

    `promoted`: so many messages of a queue that failed before are handed out among its others from now on.
    """

    chunk: Chunk
    promoted: int = 0


@dataclass(frozen=True, slots=True)
class NothingTaken:
    """There was nothing to take; `contended`: another consumer was cutting; `moved`: only other messages were seen.

    `next_due`: for so many seconds a look will find nothing, if nothing is written meanwhile.
    """

    contended: bool = False
    moved: bool = False
    promoted: int = 0
    next_due: float = 0.0


@dataclass(frozen=True, slots=True)
class Completed:
    """The chunk is done and committed, its effects with it if they are transactional; `count` messages."""

    count: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Another consumer has the batch; nothing of this one's was committed."""


@dataclass(frozen=True, slots=True)
class Deferred:
    """The message that failed has left the batch, which is done up to `pair`; None: it stops, at `named`.

    The batch itself may reach further than its last message, so it is not over with that one.
    """

    decision: RefusalDecision
    pair: Checkpoint | None = None
    named: Named | None = None


@dataclass(frozen=True, slots=True)
class Sifted:
    """Of the chunk what could be handled is, and committed; what failed alone has left the batch.

    Attributes:
        behind: so many messages, from the chunk's first up to `upto`.
        upto: where the last of them is; None: there are none.
        refusals: those of them that failed.
        block: most messages to handle at once in what comes next.
        stop: the next message failed, and this is to stop at it; `named` for a person.
        settled: false: the effects are committed, the batch is not completed yet.

    """

    behind: int
    upto: Checkpoint | None
    refusals: tuple[Refusal, ...]
    block: int
    stop: Refusal | None = None
    settled: bool = True
    named: Named | None = None

    @property
    def handled(self) -> int:
        """How many messages were handled."""
        return self.behind - len(self.refusals)


@dataclass(frozen=True, slots=True)
class HandedBack:
    """Others may have what was in hand."""


ConsumerOutcome = Joined | Taken | NothingTaken | Completed | Lost | Deferred | Sifted | HandedBack
"""Outcomes that only mode Competing has."""
Outcome = StepOutcome | ConsumerOutcome
