"""What a user can ask of a processor, as far as the data plane must know it: source, start, delivery, target.

The operator's `resources.py` embeds these models in the resource's spec and generates the CRD from them, so every
description here is what `kubectl explain` prints. Defaults live here and nowhere else.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str | timedelta) -> timedelta:
    """Read a duration as Kubernetes writes it: `500ms`, `15s`, `1m30s`.

    Raises:
        ValueError: the text is no such duration.

    """
    if isinstance(text, timedelta):
        return text
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        msg = f"{text!r} is not a duration; write for example 500ms, 15s or 1m30s"
        raise ValueError(msg)
    return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in parts))


def format_duration(value: timedelta) -> str:
    """Write a duration in whole milliseconds or seconds."""
    milliseconds = round(value.total_seconds() * 1000)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$", "maxLength": 32}),
]


def _rule(rule: str, message: str, **more: str) -> dict[str, str]:
    """One CEL validation (Kubernetes `x-kubernetes-validations`), with the remedy in its message."""
    return {"rule": rule, "message": message, **more}


def _rules(*rules: dict[str, str]) -> dict[str, Any]:
    return {"x-kubernetes-validations": list(rules)}


class SpecModel(BaseModel):
    """Base of every spec object: camelCase outside, snake_case inside, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class Engine(StrEnum):
    """What runs the processor."""

    WORKER = "Worker"
    SPARK = "Spark"


class SchemaManagement(StrEnum):
    """Who brings the database schema to the version this processor needs."""

    MANAGE = "Manage"
    VERIFY = "Verify"


class Cursor(StrEnum):
    """In which order, and up to which bound, messages are read."""

    TRANSACTION_ORDER = "TransactionOrder"


class Mode(StrEnum):
    """How messages are shared among workers."""

    ORDERED = "Ordered"
    PARTITIONED = "Partitioned"


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


class StartType(StrEnum):
    """Where a processor without a stored checkpoint starts."""

    BEGINNING = "Beginning"
    END = "End"
    POSITION = "Position"
    TIMESTAMP = "Timestamp"


ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
SqlIdentifier = Annotated[str, Field(min_length=1, max_length=63)]


class ObjectRef(SpecModel):
    """Reference to an object in the resource's namespace."""

    name: ObjectName = Field(description="Name of the object, in the same namespace as this resource.")


class Connection(SpecModel):
    """How to connect; the Secret is mounted into the pods and never read by the operator."""

    secret_ref: ObjectRef = Field(
        description=(
            "Secret with the key `uri`, or the keys `host`, `port`, `database`, `user` and `password`; for TLS "
            "`sslmode` and `ca.crt`. RabbitMQ: `uri`, or `host`, `port`, `username`, `password` and `vhost`; for TLS "
            "an amqps URI or `ca.crt`."
        )
    )


class Columns(SpecModel):
    """Names of the outbox's columns, for a table that exists already under other names."""

    position: SqlIdentifier = Field("position", description="bigint from a sequence with CACHE 1.")
    transaction_id: SqlIdentifier = Field("transaction_id", description="xid8 with default pg_current_xact_id().")
    message_id: SqlIdentifier = Field("message_id", description="Identity of the message, read as text.")
    message_type: SqlIdentifier = Field("message_type", description="Type of the message, read as text.")
    data: SqlIdentifier = Field("data", description="The payload, jsonb, json or text holding JSON.")
    publication_id: SqlIdentifier | None = Field(
        None, description="Publication of the message; without it every message is of publication `default`."
    )
    partition_key: SqlIdentifier | None = Field(None, description="Key whose messages belong together.")
    metadata: SqlIdentifier | None = Field(None, description="jsonb with what is not payload.")
    scheduled: SqlIdentifier | None = Field(None, description="timestamptz at which the message was stored.")


class Table(SpecModel):
    """An outbox table that is not the one this product creates."""

    schema_name: SqlIdentifier = Field(description="Schema of the table.")
    name: SqlIdentifier = Field(description="Name of the table.")
    columns: Columns = Field(default_factory=Columns, description="Names of its columns.")


class Source(SpecModel):
    """Where the messages are."""

    connection: Connection = Field(description="The PostgreSQL database that holds outbox and checkpoints.")
    schema_: SchemaManagement = Field(
        SchemaManagement.MANAGE,
        alias="schema",
        description=(
            "Manage: workers apply missing migrations at start. Verify: they only check, and wait while the "
            "schema is too old (run `outbox migrate` as its owner)."
        ),
    )
    schema_name: SqlIdentifier = Field(
        "outbox", description="Schema of checkpoints, claims, leases and functions, and of `messages`."
    )
    table: Table | None = Field(
        None, description="An outbox that exists already. Absent: the table `messages` in `schemaName`."
    )
    publications: list[Annotated[str, Field(min_length=1, max_length=128)]] = Field(
        default_factory=list,
        max_length=64,
        description="Handle only messages of these publications. Empty: of all.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    message_types: list[Annotated[str, Field(min_length=1, max_length=256)]] = Field(
        default_factory=list,
        max_length=256,
        description="Handle only messages of these types; others are examined and passed over. Empty: all.",
        json_schema_extra={"x-kubernetes-list-type": "set"},
    )
    cursor: Cursor = Field(
        Cursor.TRANSACTION_ORDER,
        description="TransactionOrder: by (transaction_id, position) below the oldest open transaction.",
    )


class StartFrom(SpecModel):
    """Where to start when no checkpoint is stored. With one stored, it is not used, and status says so."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            _rule(
                "(self.type == 'Position') == has(self.position)",
                "position goes with type Position: set both or neither",
            ),
            _rule(
                "(self.type == 'Timestamp') == has(self.timestamp)",
                "timestamp goes with type Timestamp: set both or neither",
            ),
        )
    )

    type: StartType = Field(
        StartType.BEGINNING,
        description=(
            "Beginning: every message there is. End: what commits from now on, with what is in flight now. "
            "Position: from the first message whose position is at least `position`. "
            "Timestamp: from the first message stored at or after `timestamp`; earlier ones may come too."
        ),
    )
    position: Annotated[int, Field(ge=0)] | None = Field(
        None, description="First position to handle.", json_schema_extra={"format": "int64"}
    )
    timestamp: datetime | None = Field(None, description="RFC 3339 time of the first message to handle.")


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
        json_schema_extra=_rules(
            _rule(
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
            "many as replicas; it cannot be changed while the processorId lives."
        ),
    )
    key: PartitionKey = Field(
        default_factory=PartitionKey,
        description="What decides the partition. A message whose key is null goes by its message id.",
    )


class Delivery(SpecModel):
    """How messages are handled."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            _rule(
                "self.checkpoint != 'BeforeHandling' || !has(self.guarantee) || self.guarantee == 'Transactional'",
                "checkpoint BeforeHandling needs guarantee Transactional: it is the same transaction",
            ),
            _rule(
                "duration(self.leaseDuration) >= duration('2s') && duration(self.leaseDuration) <= duration('10m')",
                "leaseDuration must be between 2s and 10m",
            ),
            _rule(
                "duration(self.pollInterval) >= duration('10ms') && duration(self.pollInterval) <= duration('5m')",
                "pollInterval must be between 10ms and 5m",
            ),
            _rule(
                "duration(self.timeout) >= duration('1s') && duration(self.timeout) <= duration('1h')",
                "timeout must be between 1s and 1h",
            ),
            _rule(
                "duration(self.retry.initialBackoff) <= duration(self.retry.maxBackoff)",
                "retry.initialBackoff must not be longer than retry.maxBackoff",
            ),
            _rule(
                "(self.mode == 'Partitioned') == has(self.partitions)",
                "partitions goes with mode Partitioned: set both or neither (partitions: {} for the defaults)",
            ),
            _rule(
                "self.mode == oldSelf.mode",
                "mode cannot be changed: checkpoints of one mode mean nothing to the other; use another processorId",
            ),
            _rule(
                "!has(self.partitions) || !has(oldSelf.partitions) || self.partitions == oldSelf.partitions",
                "partitions cannot be changed: the same keys would go to other checkpoints; use another processorId",
            ),
        )
    )

    mode: Mode = Field(
        Mode.ORDERED,
        description=(
            "Ordered: one active worker, messages in the cursor's order. Partitioned: messages of one key in that "
            "order, keys spread over all replicas."
        ),
    )
    partitions: Partitions | None = Field(None, description="Mode Partitioned: into how many, and by what.")
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
        description="Stop: handle nothing more until the resource or the cause is changed.",
    )
    checkpoint: CheckpointTime = Field(
        CheckpointTime.AFTER_HANDLING,
        description=(
            "BeforeHandling: store it first in the same transaction, so that a lost race costs no handling; "
            "never committed before the handling."
        ),
    )


class SqlTarget(SpecModel):
    """A statement run once for every batch, in the checkpoint's transaction."""

    statement: Annotated[str, Field(min_length=1, max_length=65_536)] = Field(
        description=(
            "One SQL statement. It sees the batch as the relation `batch` (position, transaction_id, message_id, "
            "message_type, publication_id, partition_key, data, metadata, scheduled)."
        )
    )


class PythonTarget(SpecModel):
    """A Python function called once for every batch."""

    module: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")] = Field(
        description="Module to import, from the ConfigMap or the image."
    )
    function: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z_]\w*$")] = Field(
        "handle",
        description="Function called as function(batch, connection): the batch and the transaction's connection.",
    )
    config_map_ref: ObjectRef | None = Field(
        None,
        description="ConfigMap whose keys are Python files (`orders.py`). Absent: the image has the module.",
    )


class RabbitmqTarget(SpecModel):
    """Messages published to RabbitMQ with publisher confirms."""

    connection: Connection = Field(description="The broker.")
    exchange: Annotated[str, Field(max_length=255)] = Field("", description="Exchange; empty: the default exchange.")
    routing_key: Annotated[str, Field(max_length=255)] = Field(
        "{messageType}",
        description="Routing key; {messageType}, {publicationId} and {partitionKey} are replaced.",
    )
    mandatory: bool = Field(
        True,
        description="A message that no queue takes fails the batch. False: the broker drops it silently.",
    )
    persistent: bool = Field(True, description="Delivery mode 2: the broker writes it to disk.")


class LogTarget(SpecModel):
    """One structured log line for each message."""

    payload: bool = Field(False, description="Print `data` too. Mind what your messages hold.")


class ParquetTarget(SpecModel):
    """Messages appended as Parquet files (engine Spark)."""

    path: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/")] = Field(
        description="Directory on a volume that driver and executors mount (`spark.volumes`)."
    )


TARGETS: Final = ("sql", "python", "rabbitmq", "log", "parquet")


class Target(SpecModel):
    """What to do with messages: exactly one of the fields."""

    model_config = ConfigDict(
        json_schema_extra=_rules(
            _rule(
                "[" + ", ".join(f"has(self.{t})" for t in TARGETS) + "].filter(x, x).size() == 1",
                "set exactly one target: " + ", ".join(TARGETS),
            )
        )
    )

    sql: SqlTarget | None = Field(None, description="A statement in the checkpoint's transaction.")
    python: PythonTarget | None = Field(None, description="A Python function (engine Worker).")
    rabbitmq: RabbitmqTarget | None = Field(None, description="RabbitMQ (engine Worker).")
    log: LogTarget | None = Field(None, description="A JSON line on standard output for each message (engine Worker).")
    parquet: ParquetTarget | None = Field(None, description="Parquet files (engine Spark).")


class Application(SpecModel):
    """A user's PySpark code."""

    module: Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")] = Field(
        description="Module to import, from the ConfigMap or the image."
    )
    config_map_ref: ObjectRef | None = Field(
        None, description="ConfigMap whose keys are Python files. Absent: the image has the module."
    )


class Trigger(SpecModel):
    """When a micro-batch starts."""

    processing_time: Duration = Field(timedelta(seconds=2), description="Start a micro-batch this often.")


class SparkPlan(SpecModel):
    """What the Spark driver must know beyond source, delivery and target."""

    application: Application | None = Field(
        None,
        description=(
            "Code with `transform(messages) -> rows` (streaming DataFrames; the rows go to `target`) or "
            "`handle(messages, effects)` (called for each micro-batch; it says itself what is written, and there is no "
            "`target`)."
        ),
    )
    trigger: Trigger = Field(default_factory=Trigger, description="When a micro-batch starts.")
    partitions: Annotated[int, Field(ge=1, le=1024)] = Field(
        2, description="Into how many pieces one micro-batch is read in parallel."
    )
    query_checkpoint_path: Annotated[str, Field(max_length=1024, pattern=r"^/")] = Field(
        "/var/lib/outbox/query",
        description="Directory of Spark's own query checkpoint, on a volume that outlives the driver.",
    )
    config: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Spark configuration, key to value; `spark.driver.memory` (512m) is the heap of the driver's JVM; the pod "
            "needs about 500 MB beside it. What the fields here and the operator say (image, executors, ports) wins."
        ),
    )
