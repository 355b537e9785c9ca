"""How messages are shared among workers, retried and acknowledged."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Final

from pydantic import ConfigDict, Field, WithJsonSchema

from outbox_core.spec.base import Bytes, Duration, Engine, SpecModel, SqlIdentifier, between, rule, rules
from outbox_core.spec.target import TARGETS

_BATCH_SIZE: Final = 1000
_BATCH_BYTES: Final = 16 << 20
LARGEST_BATCH: Final = 100_000
"""Messages."""
_TRANSACTIONAL: Final = ", ".join(kind.name for kind in TARGETS if kind.transactional and Engine.WORKER in kind.engines)
_OWN_TRANSACTIONS: Final = ", ".join(kind.name for kind in TARGETS if kind.own_transactions)
_AT_LEAST_ONCE: Final = ", ".join(kind.name for kind in TARGETS if not kind.transactional)


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


class Blocks(StrEnum):
    """What waits for a message that fails."""

    PARTITION = "Partition"
    KEY = "Key"
    NOTHING = "Nothing"


ErrorClasses = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=128)]],
    Field(max_length=64, json_schema_extra={"x-kubernetes-list-type": "set"}),
]


class Retry(SpecModel):
    """Attempts for a message that fails, with exponential backoff."""

    max_attempts: Annotated[int, Field(ge=1, le=1000)] = Field(
        10,
        description=(
            "Attempts before `whenExhausted`, at the message that fails: a failing batch is halved until it is alone "
            "(engine Spark: at the micro-batch). A database or broker that cannot be reached is not counted: "
            "those are tried again without end."
        ),
    )
    initial_backoff: Duration = Field(timedelta(seconds=1), description="Wait after the first failure.")
    max_backoff: Duration = Field(timedelta(minutes=1), description="Longest wait between attempts.")
    jitter: Annotated[float, Field(ge=0, le=1)] = Field(
        0.2,
        description="Share of the wait that is random, 0 to 1, so that many processors do not retry in step.",
    )
    never: ErrorClasses = Field(
        default_factory=list,
        description=(
            "Error classes with which no other attempt can succeed: attempts run out at the first. A Python "
            "exception's class or "
            "one of its bases (ValueError, orders.InvalidOrder), an SQLSTATE or its first two characters (23505, 23), "
            "or a reason (MessageRejected)."
        ),
    )
    forever: ErrorClasses = Field(
        default_factory=list,
        description=(
            "Error classes that are no message's fault (ConnectionError; MessageUnroutable where a queue that is not "
            "bound yet is waited for): tried again without end, like a target that "
            "cannot be reached, everything waits, nothing is counted as an attempt."
        ),
    )
    counted: ErrorClasses = Field(
        default_factory=list,
        description=(
            "Faults of the target that are a message's fault here and count as attempts, for example "
            "MessageUnroutable where the exchange is not declared. Absent: only what the handler, the statement or the "
            "broker says of the messages, a message that no queue takes among it."
        ),
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
            "many as replicas. A change draws a barrier: each partition stops there, and when all have, the new "
            "number goes on from it; see status.partitioning."
        ),
    )
    key: PartitionKey = Field(
        default_factory=PartitionKey,
        description="What decides the partition. A message whose key is null goes by its message id.",
    )


class Competing(SpecModel):
    """What the consumers of one processor compete for, and for how long a silent one keeps what it took."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            between("leaseDuration", "2s", "1h", "competing."),
            rule(
                "duration(self.ageing) >= duration('1s')",
                "competing.ageing must be at least 1s: it is how much waiting one level of priority is worth",
            ),
            rule(
                "has(self.queue) == has(oldSelf.queue) && (!has(self.queue) || self.queue == oldSelf.queue)",
                "competing.queue cannot be changed: what was handed out of one means nothing to another; use another "
                "processorId",
            ),
        )
    )

    queue: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", min_length=1, max_length=40)] | None = Field(
        None,
        description=(
            "Name of a queue: its table `queue_NAME` in source.schemaName has priorities, delays and unique keys, and "
            "is emptied behind the consumers. Absent: the outbox itself, whose messages others may read too."
        ),
    )
    lease_duration: Duration = Field(
        timedelta(seconds=60),
        description=(
            "How long a silent consumer keeps what it took; after that any other takes it. Judged by the database."
        ),
    )
    ageing: Duration = Field(
        timedelta(minutes=1),
        description=(
            "With a queue: how much waiting one level of priority (0 first, 9 last) is worth, so that nothing waits "
            "without end behind what is more urgent."
        ),
    )
    keep_done: Duration = Field(
        timedelta(0), description="With a queue: for how long messages that are done are kept at least."
    )


class CircuitBreaker(SpecModel):
    """Spares a target that is down, and the messages that it would fail one after the other."""

    failures: Annotated[int, Field(ge=1, le=10_000)] = Field(
        10,
        description=(
            "Failures in a row, with nothing handled between them, that open it: of the target as a whole. Of messages "
            "that were not tried before, 200 times as many keys; from this many keys on due retries wait. A message "
            "that is tried again opens nothing."
        ),
    )
    open_for: Duration = Field(
        timedelta(seconds=10),
        description=(
            "How long nothing is tried; then one message that was not tried before is the probe. Doubled by each bad "
            "probe, up to 8 times."
        ),
    )
    probes: Annotated[int, Field(ge=1, le=100)] = Field(
        1, description="Messages in a row, one at a time, that must be handled before it is closed again."
    )


class RateLimit(SpecModel):
    """How much of a target a processor may use, over all its replicas."""

    # No bound of the schema: the API server drops the fraction of one before it compares a whole number with it.
    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("double(self.messagesPerSecond) >= 0.001", "messagesPerSecond must be at least 0.001"),
        )
    )

    messages_per_second: Annotated[
        float, Field(ge=0.001, le=10_000_000), WithJsonSchema({"type": "number", "maximum": 10_000_000})
    ] = Field(description="Messages handed to the target in a second, attempts included.")
    burst: Annotated[int, Field(ge=1, le=10_000_000)] | None = Field(
        None, description="Most messages at once after a pause. Absent: those of one second, at least 1."
    )


class Delivery(SpecModel):
    """How messages are handled."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.checkpoint != 'BeforeHandling' || !has(self.guarantee) || self.guarantee == 'Transactional'",
                "checkpoint BeforeHandling needs guarantee Transactional: it is the same transaction",
            ),
            between("leaseDuration", "2s", "10m"),
            between("pollInterval", "10ms", "5m"),
            between("timeout", "1s", "1h"),
            rule(
                "duration(self.retry.initialBackoff) <= duration(self.retry.maxBackoff)",
                "retry.initialBackoff must not be longer than retry.maxBackoff",
            ),
            rule(
                "(self.mode == 'Partitioned') == has(self.partitions)",
                "partitions goes with mode Partitioned: set both or neither (partitions: {} for the defaults)",
            ),
            rule(
                "!has(self.key) || self.mode == 'Ordered' && has(self.blocks) && self.blocks == 'Key'",
                "key goes with mode Ordered and blocks: Key; mode Partitioned has partitions.key",
            ),
            rule(
                "!has(self.circuitBreaker) || duration(self.circuitBreaker.openFor) >= duration('100ms') && "
                "duration(self.circuitBreaker.openFor) <= duration('1h')",
                "circuitBreaker.openFor must be between 100ms and 1h",
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
                "self.mode != 'Competing' || !has(self.blocks)",
                "in mode Competing leave blocks out: a message that fails leaves its batch and blocks nothing",
            ),
            rule(
                "self.mode == 'Competing' || self.whenExhausted != 'Requeue'",
                "whenExhausted Requeue needs mode Competing: elsewhere it would break the order; use DeadLetter",
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
            f"where the target can ({_TRANSACTIONAL}, Spark), else AtLeastOnce ({_AT_LEAST_ONCE}). Of these a target "
            f"that has transactions of its own can be Transactional too, not in mode Competing ({_OWN_TRANSACTIONS})."
        ),
    )
    batch_size: Annotated[int, Field(ge=1, le=LARGEST_BATCH)] | None = Field(
        None,
        description=(
            "Most messages in one batch. Absent: 1000; for engine Spark 100000, or as many as have about 32 MB of data."
        ),
    )
    batch_bytes: Bytes | None = Field(
        None,
        description=(
            "Most bytes of data and metadata in one batch, 1Mi to 999Mi, where the target takes payloads; a message "
            "that is larger is a batch of its own. A batch that has so many ends before it has batchSize messages. "
            "Absent: 16Mi; for engine Spark as batchSize says. A worker has up to four batches in memory at a time, "
            "and what the handler makes of one."
        ),
    )
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
            "What becomes of a message whose attempts ran out. Stop: what it blocks waits until the resource, the "
            "handler or a person changes something (Competing: the consumer that met it). DeadLetter: it is kept with "
            "its error for `outbox redrive`; with blocks: Key its key waits behind it. Skip: it is passed over for "
            "good, and the audit log says so. Requeue (mode Competing): it is tried again later, without end."
        ),
    )
    blocks: Blocks | None = Field(
        None,
        description=(
            "What waits while a message fails. Partition: all of its partition (mode Ordered: everything). Key: later "
            "messages of its key only. Nothing: not even those, so the order of its key is given up. Absent: "
            "Partition in mode Ordered, Key in mode Partitioned."
        ),
    )
    key: PartitionKey | None = Field(
        None, description="Mode Ordered with blocks: Key: a message's key. Absent: the table's partition key column."
    )
    circuit_breaker: CircuitBreaker = Field(
        default_factory=CircuitBreaker, description="When the target fails message after message."
    )
    rate_limit: RateLimit | None = Field(None, description="Absent: as fast as the target takes them.")
    checkpoint: CheckpointTime = Field(
        CheckpointTime.AFTER_HANDLING,
        description=(
            "BeforeHandling: store it first in the same transaction, so that a lost race costs no handling; "
            "never committed before the handling."
        ),
    )

    @property
    def batch_limit(self) -> int:
        """Most messages in one batch of engine Worker: as asked, or 1000."""
        return self.batch_size or _BATCH_SIZE

    @property
    def byte_limit(self) -> int:
        """Most bytes of payloads in one batch of engine Worker: as asked, or 16 MiB."""
        return self.batch_bytes or _BATCH_BYTES

    @property
    def blocking(self) -> Blocks:
        """What a failing message blocks: as asked, or what keeps the mode's promise and no more."""
        if self.blocks is not None:
            return self.blocks
        return Blocks.KEY if self.mode is Mode.PARTITIONED else Blocks.PARTITION

    @property
    def message_key(self) -> PartitionKey | None:
        """What a message's key is; None: the spec names none, so the table's partition key column where it has one."""
        return self.partitions.key if self.partitions is not None else self.key
