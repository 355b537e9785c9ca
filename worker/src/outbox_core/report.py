"""What a worker says of itself: served at `/status` while it runs, written as termination message when it ends.

The operator knows nothing of the database but this. It is the only channel between the two, so its shape is a contract:
fields are only ever added. A report never holds a secret, a connection string or a message's payload.

What the operator shows of a report in the resource's status has the same model in both: its descriptions are the
CRD's (`make crds`), and `outbox_operator.api.status` has the rest of the status.
"""

from __future__ import annotations

from datetime import datetime
from enum import IntEnum, StrEnum
from functools import partial
from operator import not_
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel
from typing_extensions import override

from outbox_core.progress.checkpoint import parse_checkpoint


def _canonical_pair(text: str) -> str:
    return str(parse_checkpoint(text))


def _shorten(length: int, text: str) -> str:
    return text[:length]


Short = Annotated[str, AfterValidator(partial(_shorten, 256)), WithJsonSchema({"maxLength": 256, "type": "string"})]
Long = Annotated[str, AfterValidator(partial(_shorten, 1024)), WithJsonSchema({"maxLength": 1024, "type": "string"})]
Message = Annotated[str, AfterValidator(partial(_shorten, 4096)), WithJsonSchema({"maxLength": 4096, "type": "string"})]
"""Texts as long as the CRD takes them; a longer one is cut, so that the report or status it is in stays readable."""

Time = Annotated[datetime, WithJsonSchema({"format": "date-time", "maxLength": 64, "type": "string"})]

Pair = Annotated[str, AfterValidator(_canonical_pair), WithJsonSchema({"maxLength": 256, "type": "string"})]
"""A checkpoint in text form, `transaction_id:position`: JSON numbers cannot hold every xid8."""

STATUS_PORT = 8080
"""Where a worker serves /livez, /readyz, /metrics, /status (GET) and /intent (POST)."""

TERMINATION_LOG = "/dev/termination-log"
"""Kubernetes' default terminationMessagePath; the kubelet keeps at most 4,096 bytes of it."""


class ExitCode(IntEnum):
    """How a worker process ends; everything else is a crash."""

    DONE = 0
    """Asked to stop (SIGTERM), or a bounded job is finished."""
    CLAIM_HELD = 10
    """Another resource holds the processorId's claim (only `--try-claim` exits for it; a worker waits)."""
    INVALID_CONFIGURATION = 12
    """The configuration file cannot be read."""


class WorkerState(StrEnum):
    """What the process is doing, in the order of a normal life."""

    STARTING = "Starting"
    """Connecting, checking the schema, asking for the claim."""
    CLAIM_REFUSED = "ClaimRefused"
    """Another resource holds the claim; nothing is handled."""
    STANDBY = "Standby"
    """The claim is ours, another pod of the resource holds the lease."""
    ACTIVE = "Active"
    """Owner: handling messages, or waiting for some."""
    RETRYING = "Retrying"
    """Owner, and the last attempt failed; the next one is due after a backoff."""
    STOPPED = "Stopped"
    """Attempts ran out (`whenExhausted: Stop`); nothing runs until the spec or the cause is changed."""
    BLOCKED = "Blocked"
    """A conflict (2 or 3) that a person must accept or rewind; nothing is handled."""
    UNAVAILABLE = "Unavailable"
    """Cannot work: database unreachable, schema absent, handler invalid …; tried again with backoff."""
    DRAINING = "Draining"
    """Finishing or rolling back the batch and giving the lease back."""


class Reason(StrEnum):
    """Why the worker is in its state; the same words are the conditions' reasons."""

    STARTING = "Starting"
    RUNNING = "Running"
    IDLE = "Idle"
    CLAIM_HELD = "ClaimHeld"
    LEASE_HELD = "LeaseHeld"
    LEASE_LOST = "LeaseLost"
    CHECKPOINT_AHEAD = "CheckpointAhead"
    CHECKPOINT_OLDER = "CheckpointOlder"
    NOT_OWNER = "NotOwner"
    INVALID_CONFIGURATION = "InvalidConfiguration"
    CONNECTION_SECRET_INVALID = "ConnectionSecretInvalid"  # noqa: S105
    AUTHENTICATION_FAILED = "AuthenticationFailed"
    PERMISSION_DENIED = "PermissionDenied"
    DATABASE_UNAVAILABLE = "DatabaseUnavailable"
    SCHEMA_MISSING = "SchemaMissing"
    SCHEMA_MISMATCH = "SchemaMismatch"
    DATABASE_COPIED = "DatabaseCopied"
    DATABASE_BEHIND = "DatabaseBehind"
    PARTITIONS_DIFFER = "PartitionsDiffer"
    CURSOR_DIFFERS = "CursorDiffers"
    SOURCE_DIFFERS = "SourceDiffers"
    START_NOT_FOUND = "StartNotFound"
    SUPERSEDED = "Superseded"
    HANDLER_INVALID = "HandlerInvalid"
    HANDLER_FAILED = "HandlerFailed"
    HANDLER_ENDED_TRANSACTION = "HandlerEndedTransaction"
    HANDLER_TIMEOUT = "HandlerTimeout"
    STATEMENT_FAILED = "StatementFailed"
    TARGET_UNAVAILABLE = "TargetUnavailable"
    MESSAGE_UNROUTABLE = "MessageUnroutable"
    MESSAGE_REJECTED = "MessageRejected"
    MESSAGE_DELAYED = "MessageDelayed"
    PROCESS_KILLED = "ProcessKilled"
    CIRCUIT_OPEN = "CircuitOpen"
    APPLICATION_MISSING = "ApplicationMissing"
    QUERY_STATE_MISMATCH = "QueryStateMismatch"
    ATTEMPTS_EXHAUSTED = "AttemptsExhausted"
    DRAINING = "Draining"
    INTERNAL_ERROR = "InternalError"


class Intent(StrEnum):
    """What the operator says before it takes a pod away (POST /intent); without a word, SIGTERM vacates the claim."""

    KEEP_CLAIM = "KeepClaim"
    """Suspend, rollout, scale-down: the resource stays, so its claim stays."""
    RELEASE_CLAIM = "ReleaseClaim"
    """The resource is going, or hands over: give the claim up."""


class WireModel(BaseModel):
    """Base of report and status: what is unknown is dropped, so that a former version can read a newer one's."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class ResourceRef(WireModel):
    """A resource in the world; an outsider names its cluster as it likes."""

    cluster: Short = Field(description="Cluster id.")
    namespace: Short = Field(description="Namespace.")
    name: Short = Field(description="Name.")
    uid: Short = Field("", description="Uid.")

    @override
    def __str__(self) -> str:
        """`cluster/namespace/name`, the form used in conditions."""
        return f"{self.cluster}/{self.namespace}/{self.name}"


class LeaseView(WireModel):
    """One partition's lease as this worker sees it."""

    partition: int = 0
    epoch: int | None = None
    pod: str | None = None
    """Who holds it."""
    held: bool = False
    """By this very process."""
    expires_at: datetime | None = None


class PartitioningView(WireModel):
    """How many partitions the processor has, and what that changes to."""

    count: int = Field(description="Partitions there are; spec.delivery.partitions.count says how many there shall be.")
    next_count: int | None = Field(None, description="What the number changes to, once all are at the barrier.")
    at_barrier: int = Field(0, description="Partitions that have stopped there.")
    message: Message = Field("", description="How far the change is, and what it waits for.")


class CheckpointView(WireModel):
    """The stored checkpoint of one partition."""

    partition: int = Field(0, description="0 in mode Ordered; in mode Partitioned the one that is furthest behind.")
    pair: Pair = Field(description="transaction_id:position of the last message examined.")
    text: Short | None = Field(
        None,
        description="The pair for people: transaction_id:end where all of the transaction is examined.",
        exclude_if=not_,
    )
    """Written by the operator."""
    stored_at: Time | None = Field(None, description="When it was stored.")


class Lag(WireModel):
    """What is committed, matches the filters and lies behind the checkpoint."""

    messages: int = Field(description="Committed messages that match and are not handled yet.")
    at_least: bool = Field(False, description="Counting stopped at its cap: there are that many or more.")
    seconds: float = Field(description="Age of the oldest of them.")
    text: Annotated[str, Field(max_length=64)] = Field(
        "", description="Both in short, for kubectl get.", exclude_if=not_
    )
    """Written by the operator."""


STALLED_AFTER: Final = 4.0
"""Seconds that the high-water mark may stand still, with something waiting behind it, before it is reported. Workers
look every 2 s and the operator asks them every 2 s: so a stall is a condition within 10 s of its begin."""


class HighWaterMarkHolder(WireModel):
    """Who holds the high-water mark back, in parts: labels of a metric."""

    kind: str
    """`session`, `prepared`, or `worker`: a session of a processor's worker of ours."""
    pid: int | None = None
    application: str | None = None
    database: str | None = None
    role: str | None = None
    prepared: str | None = None
    """Name of a prepared transaction."""
    processor: str | None = None
    """Which processor's worker it is."""
    age_seconds: float | None = None
    """Since its transaction began; None where the worker's role may not see it."""


class HighWaterMarkStatus(WireModel):
    """The high-water mark (`pg_snapshot_xmin`) while it stands still: else it says nothing of this processor."""

    transaction_id: Short = Field(description="Nothing at or above it can be read yet.")
    age_seconds: float = Field(0, description="How long it has stood still although something waits behind it.")
    holder: Long | None = Field(None, description="Who holds it back.")


class HighWaterMark(HighWaterMarkStatus):
    """The high-water mark as a worker reports it, whether it stands still or not."""

    held_by: HighWaterMarkHolder | None = None
    others: int = 0
    """Further open transactions that have written: each holds it in its turn."""
    remedy: str | None = None
    """How to end it, and which grant would show what is hidden."""

    @property
    def stalled(self) -> bool:
        """It has stood still for so long that people are told."""
        return self.age_seconds >= STALLED_AFTER


class Unfinished(WireModel):
    """Mode Competing: what was handed out to consumers and is not done."""

    messages: int = 0
    batches: int = 0
    free: int = 0
    """Batches without a consumer: handed back, or lapsed."""
    retries: int = 0
    """Over the outbox: messages that wait for another attempt, are delayed, or were redriven; counted up to 10,000."""
    consumers: int = 0
    """Processes that live."""
    oldest_seconds: float = 0.0
    """Age of the oldest batch."""


class Conflict(WireModel):
    """One refusal by the checkpoint contract, with both pairs."""

    id: int = Field(description="Its number in the database; an acceptance names it.")
    code: int = Field(description="0 stored before, 2 further ahead, 3 older, 4 not the owner.")
    partition: int = Field(0, description="Partition.")
    expected: Pair | None = Field(None, description="Pair that the worker expected.")
    stored: Pair | None = Field(None, description="Pair that it found.")
    new: Pair | None = Field(None, description="Pair that it wanted to store.")
    epoch: int | None = Field(None, description="Its epoch.")
    pod: Short = Field("", description="Pod that was refused.")
    time: Time = Field(description="When.")
    holder: ResourceRef | None = Field(None, description="For a 4: the resource that owns the processorId.")
    holder_pod: Short | None = Field(None, description="For a 4: the pod that holds the lease.")
    needs_person: bool = Field(False, description="Waits until a person accepts the stored pair or rewinds.")


class ConflictSummary(WireModel):
    """Refusals since the processor exists, over all pods and restarts."""

    count: int = Field(0, description="Refusals of this processor's own workers.")
    by_code: Annotated[dict[str, int], Field(max_length=16)] = Field(default_factory=dict, description="By code.")
    last: Conflict | None = Field(None, description="The latest.")
    open: Conflict | None = Field(None, description="The one that waits for a person.")
    unowned_calls: int = Field(0, description="Refused calls of callers without ownership; approximate.")


class KeyRef(WireModel):
    """A key whose messages wait, and the message that they wait for."""

    key: Short = Field(description="The key, cut to 128 characters.")
    partition: int = Field(0, description="Partition.")
    message_id: Long = Field(description="The message that they wait for.")
    error_class: Short | None = Field(None, description="Class of its last error.")


class BlockedKey(KeyRef):
    """A key whose messages wait for one that fails, as a worker reports it."""

    attempts: int
    next_attempt_at: datetime | None = None
    """None: it waits for a person."""
    dead_letter: bool = False
    """The message is a dead letter already; the key waits until it is redriven or dropped."""

    @property
    def waits_for(self) -> str:
        """What has to be done to the message; in the resource's status."""
        return "Person" if self.next_attempt_at is None else "Retry"


class FailureCounts(WireModel):
    """How many messages failed, over all pods and partitions, as the database has it."""

    held: int = Field(0, description="Held: failing, behind one of their key, or delayed. Counted up to 10,000.")
    dead_letters: int = Field(0, description="Dead letters, which wait for a person. Counted up to 10,000.")


class FailureSummary(FailureCounts):
    """What became of messages that failed, as a worker reports it."""

    at_least: bool = False
    """Counting stopped at its cap."""
    blocked_keys: list[BlockedKey] = []
    """The first few."""


class RebuildState(StrEnum):
    """How far a side-by-side rebuild is."""

    CATCHING_UP = "CatchingUp"
    """Too many messages lie between this processor's checkpoint and the other one's."""
    HELD = "SwapHeld"
    """Close enough, but `hold` is set."""
    SWAPPING = "Swapping"
    """Close enough; the swap is being made, or was tried and is tried again."""
    NOT_POSSIBLE = "SwapNotPossible"
    """The other processor has no checkpoint here, or reads another source; or the swap failed."""
    SWAPPED = "Swapped"
    """Done: the other processor can never store again."""


class RebuildView(WireModel):
    """A side-by-side rebuild as the database has it; `state` is a `RebuildState`, or one of a newer version."""

    of: Short = Field(description="The processor that is replaced.")
    state: Annotated[str, Field(max_length=32)] = Field(
        description="CatchingUp, SwapHeld, Swapping, SwapNotPossible or Swapped."
    )
    behind: int | None = Field(None, description="Messages between this checkpoint and the other one's.")
    at_least: bool = Field(False, description="Counting stopped at maxLag: there are that many or more.")
    message: Long = Field("", description="Why, and what to do.")


class Report(WireModel):
    """Everything the operator may know."""

    version: int = 1
    processor_id: str
    resource: ResourceRef
    generation: int
    """metadata.generation of the spec that this process was started with."""
    pod: str
    pod_uid: str
    instance: str
    """Random per process start: a pod name or uid does not tell two processes of one container apart."""
    time: datetime
    state: WorkerState
    reason: Reason
    message: str = ""
    """For people: what is wrong and what to do. Never a payload, never a secret."""
    claim_holder: ResourceRef | None = None
    lease: LeaseView | None = None
    leases: list[LeaseView] = []
    """Of a partitioned processor: every live lease, of all processes."""
    partitioning: PartitioningView | None = None
    """Of a partitioned processor: the number of its partitions, and a change of it."""
    checkpoints: list[CheckpointView] = []
    lag: Lag | None = None
    high_water_mark: HighWaterMark | None = None
    handled: int = 0
    """Messages handled by this process."""
    batches: int = 0
    attempt: int = 0
    """Of the batch in hand: 0 when the last one succeeded."""
    start_from_used: bool | None = None
    """False: a checkpoint was stored already, so spec.startFrom was not used."""
    last_error: str | None = None
    """The latest failure with its traceback's last lines, cut to 1,500 characters."""
    conflicts: ConflictSummary = ConflictSummary()
    failures: FailureSummary | None = Field(None, exclude_if=not_)
    """None: the process has not looked yet. It is left out then: a former operator reads no null here."""
    circuit: str | None = None
    """The breaker before the target: Closed, Open or HalfOpen."""
    executors: int | None = None
    """Spark: live executors."""
    unfinished: Unfinished | None = None
    advice: str | None = None
    """What a person should do although messages are handled: an index that is missing."""
    rebuild: RebuildView | None = None
    """Of a processor that is to replace another one."""
