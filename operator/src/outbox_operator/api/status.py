"""The resource's status: `phase` for people, `conditions` for machines, and what the workers reported.

What stands as it is in a report has its model in `outbox_core.report`. Pure values: `reasons.py` decides the
conditions, `decide.py` everything else; written once by `apply.py`, and only when it differs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from outbox_core.report import (
    CheckpointView,
    ConflictSummary,
    FailureCounts,
    HighWaterMarkStatus,
    KeyRef,
    Lag,
    Message,
    PartitioningView,
    RebuildView,
    ResourceRef,
    Short,
    Time,
    WireModel,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_MESSAGE: Final = 4096


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


def conditions_of(body: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Read the conditions of an object of any kind, by their type."""
    return {each["type"]: each for each in (body.get("status") or {}).get("conditions") or ()}


def true_conditions(body: Mapping[str, Any]) -> set[str]:
    """Read which conditions of an object of any kind are true."""
    return {kind for kind, each in conditions_of(body).items() if each["status"] == "True"}


class Condition(WireModel):
    """One question with its answer."""

    type: Annotated[str, Field(max_length=64)] = Field(description="The question.")
    status: Annotated[str, Field(max_length=16, pattern="^(True|False|Unknown)$")] = Field(description="The answer.")
    reason: Annotated[str, Field(max_length=128)] = Field(description="Why, in one word; see docs/conflicts.md.")
    message: Message = Field("", description="Why, and what to do.")
    last_transition_time: Time = Field(description="When the answer changed.")
    observed_generation: int = Field(0, description="Generation of the spec that the answer is about.")


class OwnerStatus(WireModel):
    """Who handles messages now."""

    pod: Short = Field(
        description="Pod that holds the lease; in modes Partitioned and Competing, how many pods share the work."
    )
    epoch: int = Field(0, description="Number of its lease; a takeover raises it.")


class OwnershipStatus(WireModel):
    """What is known about the claim, and when it is tried again."""

    state: Annotated[str, Field(max_length=32)] = Field(
        "Unknown", description="Unknown, Trying, Granted, Refused or HandedOver."
    )
    holder: ResourceRef | None = Field(None, description="Who holds it, when it is not this resource.")
    attempts: int = Field(0, description="Tries since it was refused.")
    tries: int = Field(0, description="Tries ever; numbers the jobs that try.")
    last_try: Time | None = Field(None, description="Time of the last try.")
    problem: Short | None = Field(None, description="Why the last try could not ask, in one word.")
    problem_message: Message | None = Field(None, description="Why, and what to do.")
    next_try: Time | None = Field(None, description="A short-lived pod tries the claim again at this time.")


class PartitionStatus(WireModel):
    """One partition of a processor in mode Partitioned."""

    partition: int = Field(description="Its number, from 0.")
    pod: Short | None = Field(None, description="Pod that owns it; absent while nobody does.")
    epoch: int = Field(0, description="Number of the owner's lease; a move raises it.")
    pair: Short | None = Field(None, description="transaction_id:position of the last message examined.")


class BlockedKeyStatus(KeyRef):
    """A key whose messages wait for one of them."""

    waits_for: Annotated[str, Field(max_length=32)] = Field(description="Retry: it is tried again. Person: redrive it.")


class FailuresStatus(FailureCounts):
    """What became of messages that failed."""

    circuit: Annotated[str, Field(max_length=32)] = Field("", description="Breaker: Closed, Open or HalfOpen.")
    blocked_keys: list[BlockedKeyStatus] = Field(
        default_factory=list, max_length=16, description="The first few keys that wait, those for a person first."
    )


class HandOverStatus(WireModel):
    """Progress of handOverTo."""

    to: Short = Field(description="cluster/namespace/name.")
    step: Annotated[str, Field(max_length=32)] = Field(description="Waiting, Draining, Transferring, Done or Failed.")
    time: Time | None = Field(None, description="When the step was reached.")
    message: Message = Field("", description="What went wrong, or what it waits for.")


class ProcessorStatus(WireModel):
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
    checkpoint: CheckpointView | None = Field(None, description="How far was examined.")
    partitions: list[PartitionStatus] = Field(
        default_factory=list,
        max_length=64,
        description="Mode Partitioned: who owns which partition, and how far it is.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["partition"]},
    )
    partitioning: PartitioningView | None = Field(
        None, description="Mode Partitioned: the number of partitions, and a change of it."
    )
    lag: Lag | None = Field(None, description="What waits behind the checkpoint.")
    high_water_mark: HighWaterMarkStatus | None = Field(
        None, description="What holds reading back, while something does."
    )
    conflicts: ConflictSummary = Field(default_factory=ConflictSummary, description="Refusals.")
    failures: FailuresStatus | None = Field(None, description="Messages that failed.")
    hand_over: HandOverStatus | None = Field(None, description="Progress of spec.handOverTo.")
    rebuild: RebuildView | None = Field(None, description="Progress of spec.rebuildOf.")
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
