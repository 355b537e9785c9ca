"""How messages are shared among workers, retried and acknowledged."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated

from pydantic import ConfigDict, Field

from outbox_core.spec.base import Duration, SpecModel, SqlIdentifier, rule, rules
from outbox_core.spec.competing import Competing


class Mode(StrEnum):
    """How messages are shared among workers."""

    ORDERED = "Ordered"
    PARTITIONED = "Partitioned"
    COMPETING = "Competing"


class Guarantee(StrEnum):
    """What a crash can do to the effects."""

    TRANSACTIONAL = "Transactional"
    AT_LEAST_ONCE = "AtLeastOnce"


class CheckpointTime(StrEnum):
    """When in the batch's transaction the checkpoint is stored."""

    AFTER_HANDLING = "AfterHandling"
    BEFORE_HANDLING = "BeforeHandling"


class WhenExhausted(StrEnum):
    """What happens to a batch whose attempts ran out."""

    STOP = "Stop"
    DEAD_LETTER = "DeadLetter"
    REQUEUE = "Requeue"
    SKIP = "Skip"


class Retry(SpecModel):
    """Attempts for a message that fails, with exponential backoff."""

    max_attempts: Annotated[int, Field(ge=1, le=1000)] = Field(
        10,
        description=(
            "Attempts before `whenExhausted`, at the message that fails: a failing batch is halved until it is alone "
            "(engine Spark: at the micro-batch). A database or broker that cannot be reached is not counted: "
            "those are tried again for ever."
        ),
    )
    initial_backoff: Duration = Field(timedelta(seconds=1), description="Wait after the first failure.")
    max_backoff: Duration = Field(timedelta(minutes=1), description="Longest wait between attempts.")
    jitter: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2,
        description="Share of the wait that is random, 0 to 1, so that many processors do not retry in step.",
    )


PathPart = Annotated[str, Field(min_length=1, max_length=128)]


class PartitionKey(SpecModel):
    """What of a message its partition depends on: at most one of the fields."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[has(self.column), has(self.data), has(self.metadata)].filter(x, x).size() <= 1",
                "set at most one of column, data and metadata: a message has one key",
            )
        )
    )

    column: SqlIdentifier | None = Field(
        None, description="Column of the outbox table. Absent, and no path: the table's partition key column."
    )
    data: Annotated[list[PathPart], Field(min_length=1, max_length=8)] | None = Field(
        None, description="Path into the payload, for example [order, customerId]."
    )
    metadata: Annotated[list[PathPart], Field(min_length=1, max_length=8)] | None = Field(
        None, description="Path into the metadata."
    )


class Partitions(SpecModel):
    """Mode Partitioned: messages of one key are handled in order, keys side by side on several replicas."""

    count: Annotated[int, Field(ge=2, le=64)] = Field(
        8,
        description=(
            "Into how many partitions the keys are hashed, each with its own checkpoint, lease and epoch. At least as "
            "many as replicas. A change draws a stop line: each partition stops there, and when all have, the new "
            "number goes on from it; see status.division."
        ),
    )
    key: PartitionKey = Field(
        default_factory=PartitionKey,
        description="What decides the partition. A message whose key is null goes by its message id.",
    )


class Delivery(SpecModel):
    """How messages are handled."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.checkpoint != 'BeforeHandling' || !has(self.guarantee) || self.guarantee == 'Transactional'",
                "checkpoint BeforeHandling needs guarantee Transactional: it is the same transaction",
            ),
            rule(
                "duration(self.leaseDuration) >= duration('2s') && duration(self.leaseDuration) <= duration('10m')",
                "leaseDuration must be between 2s and 10m",
            ),
            rule(
                "duration(self.pollInterval) >= duration('10ms') && duration(self.pollInterval) <= duration('5m')",
                "pollInterval must be between 10ms and 5m",
            ),
            rule(
                "duration(self.timeout) >= duration('1s') && duration(self.timeout) <= duration('1h')",
                "timeout must be between 1s and 1h",
            ),
            rule(
                "duration(self.retry.initialBackoff) <= duration(self.retry.maxBackoff)",
                "retry.initialBackoff must not be longer than retry.maxBackoff",
            ),
            rule(
                "(self.mode == 'Partitioned') == has(self.partitions)",
                "partitions goes with mode Partitioned: set both or neither (partitions: {} for the defaults)",
            ),
            rule(
                "(self.mode == 'Competing') == has(self.competing)",
                "competing goes with mode Competing: set both or neither (competing: {} for the outbox itself)",
            ),
            rule(
                "self.mode != 'Competing' || self.leaseDuration == '15s'",
                "in mode Competing leave leaseDuration out and set competing.leaseDuration: consumers lease batches",
            ),
            rule(
                "self.mode != 'Competing' || self.checkpoint == 'AfterHandling'",
                "in mode Competing leave checkpoint out: consumers complete batches, no checkpoint is stored by them",
            ),
            rule(
                "self.mode == oldSelf.mode",
                "mode cannot be changed: checkpoints of one mode mean nothing to the other; use another processorId",
            ),
            rule(
                "!has(self.partitions) || !has(oldSelf.partitions) || self.partitions.key == oldSelf.partitions.key",
                "partitions.key cannot be changed, only partitions.count: what was handled was ordered by the former "
                "key; use another processorId with startFrom",
            ),
        )
    )

    mode: Mode = Field(
        Mode.ORDERED,
        description=(
            "Ordered: one active worker, messages in the cursor's order. Partitioned: messages of one key in that "
            "order, keys spread over all replicas. Competing: all replicas take batches, first in first out, no order."
        ),
    )
    partitions: Partitions | None = Field(None, description="Mode Partitioned: into how many, and by what.")
    competing: Competing | None = Field(None, description="Mode Competing: for what, and how.")
    guarantee: Guarantee | None = Field(
        None,
        description=(
            "Transactional: effects and checkpoint commit in one transaction. AtLeastOnce: effects first, then "
            "the checkpoint; a crash between repeats the batch with the same message ids. Absent: Transactional "
            "where the target can (sql, python, Spark), else AtLeastOnce (rabbitmq, log)."
        ),
    )
    batch_size: Annotated[int, Field(ge=1, le=100_000)] = Field(1000, description="Most messages in one batch.")
    poll_interval: Duration = Field(
        timedelta(milliseconds=500), description="Longest wait between two looks while nothing is there."
    )
    lease_duration: Duration = Field(
        timedelta(seconds=15),
        description="How long a silent owner is believed alive; a standby takes over after it. Judged by the database.",
    )
    timeout: Duration = Field(
        timedelta(minutes=1),
        description="Longest handling of one batch; its transaction is rolled back after that.",
    )
    retry: Retry = Field(default_factory=Retry, description="What to do when a batch fails.")
    when_exhausted: WhenExhausted = Field(
        WhenExhausted.STOP,
        description=(
            "Stop: handle nothing more until the resource or the cause is changed (Competing: the consumer that met "
            "it). DeadLetter: keep the message for a person and go on. Requeue: try it again later, for ever. Skip: go "
            "on without it."
        ),
    )
    checkpoint: CheckpointTime = Field(
        CheckpointTime.AFTER_HANDLING,
        description=(
            "BeforeHandling: store it first in the same transaction, so that a lost race costs no handling; "
            "never committed before the handling."
        ),
    )
