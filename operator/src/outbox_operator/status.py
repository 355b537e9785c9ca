"""The resource's status: `phase` for people, `conditions` for machines, and what the workers reported.

Pure values. `conditions.py` decides the conditions, `decide.py` everything else; written once by `apply.py`, and only
when it differs.
"""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, PlainSerializer, WithJsonSchema

from outbox_core.report import _Report

MAX_MESSAGE: Final = 4096


def _format_time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[
    datetime,
    PlainSerializer(_format_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64}),
]
Short = Annotated[str, Field(max_length=256)]
Message = Annotated[str, Field(max_length=MAX_MESSAGE)]


class Phase(StrEnum):
    """One word for people; machines read the conditions."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    RETRYING = "Retrying"
    UNAVAILABLE = "Unavailable"
    STOPPED = "Stopped"
    BLOCKED = "Blocked"
    WAITING = "WaitingForOwner"
    SUSPENDED = "Suspended"
    HANDING_OVER = "HandingOver"
    HANDED_OVER = "HandedOver"
    INVALID = "Invalid"


class StatusModel(_Report):
    """Base of every status object: what is unknown is dropped, so that an older operator can read a newer status."""


class Condition(StatusModel):
    """One question with its answer."""

    type: Annotated[str, Field(max_length=64)] = Field(description="The question.")
    status: Annotated[str, Field(max_length=16, pattern="^(True|False|Unknown)$")] = Field(description="The answer.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word; see docs/conflicts.md.")
    message: Message = Field("", description="Why, and what to do.")
    last_transition_time: Time = Field(description="When the answer changed.")
    observed_generation: int = Field(0, description="Generation of the spec that the answer is about.")


class OwnerRef(StatusModel):
    """A resource that holds the processorId."""

    cluster: Short = Field(description="Cluster id.")
    namespace: Short = Field(description="Namespace.")
    name: Short = Field(description="Name.")
    uid: Short = Field("", description="Uid.")


class OwnerStatus(StatusModel):
    """Who handles messages now."""

    pod: Short = Field(
        description="Pod that holds the lease; in modes Partitioned and Competing, how many pods share the work."
    )
    epoch: int = Field(0, description="Number of its lease; a takeover raises it.")


class OwnershipStatus(StatusModel):
    """What is known about the claim, and when it is tried again."""

    state: Annotated[str, Field(max_length=32)] = Field(
        "Unknown", description="Unknown, Trying, Granted, Refused or HandedOver."
    )
    holder: OwnerRef | None = Field(None, description="Who holds it, when it is not this resource.")
    attempts: int = Field(0, description="Tries since it was refused.")
    tries: int = Field(0, description="Tries ever; numbers the jobs that try.")
    last_try: Time | None = Field(None, description="Time of the last try.")
    problem: Short | None = Field(None, description="Why the last try could not ask, in one word.")
    problem_message: Message | None = Field(None, description="Why, and what to do.")
    next_try: Time | None = Field(None, description="A short-lived pod tries the claim again at this time.")


class CheckpointStatus(StatusModel):
    """How far was examined."""

    partition: int = Field(0, description="0 in mode Ordered; in mode Partitioned the one that is furthest behind.")
    pair: Short = Field(description="transaction_id:position of the last message examined.")
    text: Short | None = Field(
        None, description="The pair for people: transaction_id:end where all of the transaction is examined."
    )
    stored_at: Time | None = Field(None, description="When it was stored.")


class PartitionStatus(StatusModel):
    """One partition of a processor in mode Partitioned."""

    partition: int = Field(description="Its number, from 0.")
    pod: Short | None = Field(None, description="Pod that owns it; absent while nobody does.")
    epoch: int = Field(0, description="Number of the owner's lease; a move raises it.")
    pair: Short | None = Field(None, description="transaction_id:position of the last message examined.")


class DivisionStatus(StatusModel):
    """Into how many partitions the processor is divided."""

    count: int = Field(description="Partitions there are; spec.delivery.partitions.count says how many there shall be.")
    next_count: int | None = Field(None, description="What the number changes to, once all are at the stop line.")
    at_line: int = Field(0, description="Partitions that have stopped there.")
    message: Message = Field("", description="How far the change is, and what it waits for.")


class LagStatus(StatusModel):
    """What waits behind the checkpoint."""

    messages: int = Field(description="Committed messages that match and are not handled yet.")
    at_least: bool = Field(False, description="Counting stopped at its cap: there are that many or more.")
    seconds: float = Field(description="Age of the oldest of them.")
    text: Annotated[str, Field(max_length=64)] = Field("", description="Both in short, for kubectl get.")


class BoundStatus(StatusModel):
    """The reading bound (`pg_snapshot_xmin`) while it stands still: else it says nothing of this processor."""

    transaction_id: Short = Field(description="Nothing at or above it can be read yet.")
    age_seconds: float = Field(0, description="How long it has stood still although something waits behind it.")
    holder: Annotated[str, Field(max_length=1024)] | None = Field(None, description="Who holds it back.")


class ConflictStatus(StatusModel):
    """One refusal by the checkpoint contract."""

    id: int = Field(description="Its number in the database; an acceptance names it.")
    code: int = Field(description="0 stored before, 2 further ahead, 3 older, 4 not the owner.")
    partition: int = Field(0, description="Partition.")
    expected: Short | None = Field(None, description="Pair that the worker expected.")
    stored: Short | None = Field(None, description="Pair that it found.")
    new: Short | None = Field(None, description="Pair that it wanted to store.")
    epoch: int | None = Field(None, description="Its epoch.")
    pod: Short = Field("", description="Pod that was refused.")
    time: Time = Field(description="When.")
    holder: OwnerRef | None = Field(None, description="For a 4: the resource that owns the processorId.")
    holder_pod: Short | None = Field(None, description="For a 4: the pod that holds the lease.")
    needs_person: bool = Field(False, description="Waits until somebody accepts the stored pair or rewinds.")


class ConflictsStatus(StatusModel):
    """Refusals since the processor exists, over all pods and restarts."""

    count: int = Field(0, description="Refusals of this processor's own workers.")
    by_code: Annotated[dict[str, int], Field(max_length=16)] = Field(default_factory=dict, description="By code.")
    last: ConflictStatus | None = Field(None, description="The latest.")
    open: ConflictStatus | None = Field(None, description="The one that waits for a person.")
    strangers: int = Field(0, description="Refused calls of callers without ownership; approximate.")


class BlockedKeyStatus(StatusModel):
    """A key whose messages wait for one of them."""

    key: Short = Field(description="The key, cut to 128 characters.")
    partition: int = Field(0, description="Partition.")
    message_id: Annotated[str, Field(max_length=1024)] = Field(description="The message that they wait for.")
    error_class: Short | None = Field(None, description="Class of its last error.")
    waits_for: Annotated[str, Field(max_length=32)] = Field(description="Retry: it is tried again. Person: redrive it.")


class FailuresStatus(StatusModel):
    """What became of messages that failed."""

    held: int = Field(0, description="Held: failing, behind one of their key, or delayed. Counted up to 10,000.")
    dead_letters: int = Field(0, description="Dead letters, which wait for a person. Counted up to 10,000.")
    circuit: Annotated[str, Field(max_length=32)] = Field("", description="Breaker: Closed, Open or HalfOpen.")
    blocked_keys: list[BlockedKeyStatus] = Field(
        default_factory=list, max_length=16, description="The first few keys that wait, those for a person first."
    )


class HandOverStatus(StatusModel):
    """Progress of handOverTo."""

    to: Short = Field(description="cluster/namespace/name.")
    step: Annotated[str, Field(max_length=32)] = Field(description="Draining, Transferring, Done or Failed.")
    time: Time | None = Field(None, description="When the step was reached.")
    message: Message = Field("", description="What went wrong.")


class RebuildStatus(StatusModel):
    """How far a side-by-side rebuild is."""

    of: Short = Field(description="The processor that is replaced.")
    state: Annotated[str, Field(max_length=32)] = Field(
        description="CatchingUp, SwapHeld, Swapping, SwapNotPossible or Swapped."
    )
    behind: int | None = Field(None, description="Messages between this checkpoint and the other one's.")
    at_least: bool = Field(False, description="Counting stopped at maxLag: there are that many or more.")
    message: Annotated[str, Field(max_length=1024)] = Field("", description="Why, and what to do.")


class ProcessorStatus(StatusModel):
    """What is so, as last observed."""

    observed_generation: int = Field(0, description="Generation that this status is about.")
    phase: Annotated[str, Field(max_length=32)] = Field(Phase.PENDING, description="One word for people.")
    mode: Annotated[str, Field(max_length=32)] = Field("", description="spec.delivery.mode in force.")
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=32,
        description="Answers for machines.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    owner: OwnerStatus | None = Field(None, description="Who handles messages now.")
    ownership: OwnershipStatus = Field(default_factory=OwnershipStatus, description="The claim on the processorId.")
    checkpoint: CheckpointStatus | None = Field(None, description="How far was examined.")
    partitions: list[PartitionStatus] = Field(
        default_factory=list,
        max_length=64,
        description="Mode Partitioned: who owns which partition, and how far it is.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["partition"]},
    )
    division: DivisionStatus | None = Field(
        None, description="Mode Partitioned: the number of partitions, and a change of it."
    )
    lag: LagStatus | None = Field(None, description="What waits behind the checkpoint.")
    bound: BoundStatus | None = Field(None, description="What holds reading back, while something does.")
    conflicts: ConflictsStatus = Field(default_factory=ConflictsStatus, description="Refusals.")
    failures: FailuresStatus | None = Field(None, description="Messages that failed.")
    hand_over: HandOverStatus | None = Field(None, description="Progress of spec.handOverTo.")
    rebuild: RebuildStatus | None = Field(None, description="Progress of spec.rebuildOf.")
    replicas: int = Field(0, description="Pods that run.")
    ready_replicas: int = Field(0, description="Pods that are ready.")
    executors: int | None = Field(None, description="Live Spark executors.")
    selector: Annotated[str, Field(max_length=512)] = Field("", description="Label selector of the pods.")
    applied_hash: Annotated[str, Field(max_length=64)] = Field(
        "", description="Hash of the owned objects as the operator left them: while they are so, none is applied again."
    )
    workload_hash: Annotated[str, Field(max_length=64)] = Field("", description="Hash of the intent last rolled out.")
    start_from_used: bool | None = Field(None, description="False: a checkpoint was stored, so startFrom was not used.")
    reported_at: Time | None = Field(None, description="Time of the worker's report that the figures are from.")
