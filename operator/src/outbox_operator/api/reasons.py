"""PURE: the types of the conditions, and their reasons.

`Ready` answers whether what was asked is so. `Reconciling` and `Stalled` are abnormal-true, as kstatus (Helm 4, Flux)
reads them. Reasons are the words of this enum or of `outbox_core.report.Reason`; `docs/runbook.md` explains each.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class ConditionType(StrEnum):
    """The questions."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    OWNERSHIP_GRANTED = "OwnershipGranted"
    CHECKPOINT_HEALTHY = "CheckpointHealthy"
    SOURCE_CURRENT = "SourceCurrent"
    MESSAGES_FLOW = "MessagesFlow"
    WORKERS_AVAILABLE = "WorkersAvailable"
    SUSPENDED = "Suspended"
    SWAPPED = "Swapped"


class Reason(StrEnum):
    """The operator's own reasons; a worker's reasons (`outbox_core.report.Reason`) appear as they are."""

    AS_EXPECTED = "AsExpected"
    """Nothing to say."""
    NOT_OBSERVED = "NotObserved"
    """No worker has said anything about it yet."""
    RUNNING = "Running"
    """Messages are being handled, or there are none to handle."""
    STARTING = "Starting"
    """Pods were made; none of them is the active owner yet."""
    ROLLING_OUT = "RollingOut"
    """The spec or the operator's version changed; the old pods are being replaced."""
    WAITING_FOR_ROLLOUT = "WaitingForRollout"
    """The operator's version changed; the old pods work on until it is this processor's turn."""
    CHANGING_PARTITIONS = "ChangingPartitions"
    """spec.delivery.partitions.count changed: the partitions there are go on to the barrier first."""
    STOPPING = "Stopping"
    """Pods are finishing or rolling back their batch."""
    SUSPENDED = "Suspended"
    """Asked by spec.suspend."""
    NOT_SUSPENDED = "NotSuspended"
    """Neither the spec nor a conflict keeps the workers away."""
    SCALED_TO_ZERO = "ScaledToZero"
    """Asked by spec.worker.replicas: 0."""
    CLAIM_GRANTED = "ClaimGranted"
    """This resource holds the claim."""
    CLAIMING = "Claiming"
    """Another resource asks for the same processorId: before workers start, the database is asked whose it is."""
    CLAIM_HELD = "ClaimHeld"
    """Another resource holds the claim on the processorId."""
    HANDING_OVER = "HandingOver"
    """spec.handOverTo is being carried out."""
    HANDED_OVER = "HandedOver"
    """The claim was given to the resource named by spec.handOverTo."""
    HAND_OVER_FAILED = "HandOverFailed"
    """The claim could not be given away."""
    CONFLICT_OPEN = "ConflictOpen"
    """A conflict waits for a person."""
    RESOLVING = "Resolving"
    """A person decided about the conflict; a worker carries it out."""
    CHECKPOINT_AHEAD = "CheckpointAhead"
    """A worker was told 2: the stored pair is further ahead than it had written."""
    CHECKPOINT_OLDER = "CheckpointOlder"
    """A worker was told 3: the stored pair is older than it had written."""
    NOT_OWNER = "NotOwner"
    """A worker was told 4 because another resource took the processor over."""
    HIGH_WATER_MARK_MOVES = "HighWaterMarkMoves"
    """What is committed becomes readable."""
    HIGH_WATER_MARK_STALLED = "HighWaterMarkStalled"
    """A transaction or prepared transaction holds the high-water mark back."""
    KEY_BLOCKED = "KeyBlocked"
    """Messages of a key wait behind one that fails, or for a person."""
    DEAD_LETTERS = "DeadLetters"
    """Messages whose attempts ran out wait for a person; nothing waits behind them."""
    CIRCUIT_OPEN = "CircuitOpen"
    """The target failed again and again: it is spared for a while."""
    INVALID_SPEC = "InvalidSpec"
    """The spec cannot be read by this version of the operator, or asks for pods that are not allowed."""
    WORKER_UNREACHABLE = "WorkerUnreachable"
    """A pod runs and does not answer at /status."""
    NO_WORKERS = "NoWorkers"
    """No pods are wanted."""
    CONNECTION_SECRET_INVALID = "ConnectionSecretInvalid"  # noqa: S105
    """A Secret is missing."""
    CONFIG_MAP_MISSING = "ConfigMapMissing"
    """A ConfigMap is missing."""
    IMAGE_UNAVAILABLE = "ImageUnavailable"
    """The image cannot be pulled."""
    UNSCHEDULABLE = "Unschedulable"
    """No node takes the pod."""
    POD_REJECTED = "PodRejected"
    """The API server refuses the pod (admission, quota)."""
    CRASHING = "Crashing"
    """The container ends again and again."""
    POD_NOT_STARTED = "PodNotStarted"
    """The pod does not start."""
    NAME_TAKEN = "NameTaken"
    """An object of another owner has the name that this one needs."""
    APPLY_FAILED = "ApplyFailed"
    """The API server refused an owned object."""


IN_FLIGHT: Final = frozenset(
    {
        Reason.STARTING,
        Reason.ROLLING_OUT,
        Reason.STOPPING,
        Reason.HANDING_OVER,
        Reason.RESOLVING,
        Reason.CLAIMING,
        Reason.CHANGING_PARTITIONS,
    }
)
"""Reasons of a change that is being carried out: no person has to do anything."""
