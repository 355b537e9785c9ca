"""What to do with messages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, get_args

from pydantic import ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from outbox_core.spec.base import (
    Connection,
    Duration,
    Engine,
    ModuleName,
    ObjectRef,
    ProcessorId,
    SpecModel,
    rule,
    rules,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_ELSEWHERE: Final = (
    "Another PostgreSQL database for the effects: checkpoint, claim and leases live there too (in a schema named as "
    "source.schemaName), so that effects and checkpoint commit together; the source is only read. Absent: the source's "
    "database. Cannot be added or taken away later."
)


class SqlTarget(SpecModel):
    """A statement run once for every batch, in the checkpoint's transaction."""

    connection: Connection | None = Field(None, description=_ELSEWHERE)

    statement: Annotated[str, Field(min_length=1, max_length=65_536)] = Field(
        description=(
            "One SQL statement. It sees the batch as the relation `batch` (position, transaction_id, message_id, "
            "message_type, publication_id, partition_key, data, metadata, scheduled, ordinal). ORDER BY ordinal is the "
            "order in which the processor reads; a relation has none of its own. (Engine Spark has no ordinal.)"
        )
    )


class Rebuild(SpecModel):
    """A projection built anew beside the one that is read, and swapped for it."""

    processor_id: ProcessorId = Field(
        description="The processor to replace: same source, checkpoint in the same database. Both run until the swap."
    )
    swap_statement: Annotated[str, Field(min_length=1, max_length=65_536)] = Field(
        description=(
            "SQL, one or several statements, run once in the transaction of the swap: replace the view that readers "
            "read, or rename tables. This processor's own statement goes on unchanged after it, so the names that it "
            "writes to must stay."
        )
    )
    max_lag: Annotated[int, Field(ge=0, le=100_000)] = Field(
        1000,
        description=(
            "Swap when no more than so many messages lie between this checkpoint and the other one's: the transaction "
            "of the swap handles them, while the other processor waits."
        ),
    )
    hold: bool = Field(
        False,
        description="Catch up and keep up, but do not swap yet: look at the new tables first, then set it to false.",
    )


class PythonTarget(SpecModel):
    """A Python function called once for every batch."""

    connection: Connection | None = Field(None, description=_ELSEWHERE)
    module: ModuleName = Field(description="Module to import, from the ConfigMap or the image.")
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
        description="A message that no queue takes fails, and that counts as an attempt. False: the broker drops it "
        "silently.",
    )
    persistent: bool = Field(True, description="Delivery mode 2: the broker writes it to disk.")


class RabbitmqStreamTarget(SpecModel):
    """Messages published to one stream of RabbitMQ with numbers, by which the broker drops what it has already."""

    connection: Connection = Field(
        description="The broker: Secret with the key `uri` (rabbitmq-stream://user:password@host:5552/vhost, or "
        "rabbitmq-stream+tls://host:5551), or the keys `host`, `port`, `username`, `password` and `vhost`; for TLS "
        "`ca.crt`."
    )
    stream: Annotated[str, Field(min_length=1, max_length=255)] = Field(description="The stream. It must exist.")


Template = Annotated[str, Field(max_length=512, pattern=r"^([^{}]|\{(messageType|publicationId|partitionKey)\})+$")]
TopicTemplate = Annotated[
    str, Field(max_length=249, pattern=r"^([a-zA-Z0-9._-]|\{(messageType|publicationId|partitionKey)\})+$")
]


class KafkaTarget(SpecModel):
    """Messages published to Kafka by an idempotent producer, each of a key to one partition of its topic."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.checkpointTopic) || self.checkpointTopic != self.topic",
                "checkpointTopic cannot be the topic of the messages: Kafka compacts it, and would delete messages; "
                "name another one",
            ),
        )
    )

    connection: Connection = Field(
        description="The brokers: Secret with the keys `bootstrapServers` (host:port, several with commas between) and "
        "where they ask for it `username`, `password`, `saslMechanism` (PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512), `tls` "
        "(true or false) and `ca.crt` (authority of the brokers' certificates)."
    )
    topic: TopicTemplate = Field(
        description="Topic; {messageType}, {publicationId} and {partitionKey} are replaced. It must exist."
    )
    checkpoint_topic: Annotated[str, Field(max_length=249, pattern=r"^[a-zA-Z0-9._-]+$")] | None = Field(
        None,
        description="Guarantee Transactional: compacted topic in which each transaction writes down what it published, "
        "with at least as many partitions as the processor has. It is created if it is missing and the user may do so. "
        "Absent: outbox-checkpoints-PROCESSOR_ID.",
    )


class HttpTarget(SpecModel):
    """Each message is posted as a CloudEvent, in order per key. docs/http.md says what the receiver gets."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                r"!self.url.matches('^https?://[^/?]*:(0+|6553[6-9]|655[4-9][0-9]|65[6-9]..|6[6-9]...|[7-9]....)"
                r"([/?]|$)')",
                "url: the port must be between 1 and 65535",
            ),
        )
    )

    url: Annotated[str, Field(max_length=2048, pattern=r"^https?://[A-Za-z0-9_.-]+(:\d{1,5})?([/?][!-~]*)?$")] = Field(
        description="Where messages are posted to. Redirects are not followed."
    )
    connection: Connection | None = Field(
        None,
        description="Secret with any of the keys `token` (bearer token), `signingKey` (base64 of at least 24 bytes; "
        "several, with a space between, sign side by side) and `ca.crt` (authority of the receiver's certificate).",
    )
    content_mode: Literal["Structured", "Binary"] = Field(
        "Structured", description="Structured: one JSON body. Binary: the data as body, the rest as headers."
    )
    source: Template = Field(
        "/outbox/{publicationId}",
        description="The event's source; {messageType}, {publicationId} and {partitionKey} are replaced.",
    )
    type: Template = Field("{messageType}", description="The event's type, with the same placeholders.")
    parallelism: Annotated[int, Field(ge=1, le=64)] = Field(
        8, description="Most requests at once, each of another key. 1: one after another, in the order of the messages."
    )
    request_timeout: Duration = Field(
        timedelta(seconds=10), description="Longest wait for a connection, and for the whole answer."
    )


class LogTarget(SpecModel):
    """One structured log line for each message."""

    payload: bool = Field(False, description="Print `data` too. Mind what your messages hold.")


class ParquetTarget(SpecModel):
    """Messages appended as Parquet files (engine Spark)."""

    path: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^/")] = Field(
        description="Directory on a volume that driver and executors mount (`spark.volumes`)."
    )


@dataclass(frozen=True, slots=True)
class TargetKind:
    """What differs between targets: CEL rules, default guarantee, mounts and tables are made from it.

    A new target is a model above, a field of `Target` with such a line, and for engine Worker a module
    `outbox_worker.targets.<name>` with a function `build(target, config, settings)`, imported only where it is used.

    Attributes:
        transactional: its effects commit with the checkpoint, else they happen outside the database: AtLeastOnce.
        own_transactions: outside the database, but able to be Transactional by transactions of its own, where that is
            asked for: what was published is written down in them, and the checkpoint follows.
        numbers: its receiver drops what it has by numbers, which count messages in one order
            (`outbox_core.progress.numbering`).
        name: of its field in the resource's `target`.
        attribute: of its field in `Target`, and of its module.
        connects: its model has a `connection`, whose Secret is mounted. Of a transactional target that is another
            database, where the checkpoint lives too.

    """

    engines: tuple[Engine, ...]
    transactional: bool
    numbers: bool = False
    own_transactions: bool = False
    name: str = ""
    attribute: str = ""
    connects: bool = False

    @property
    def path(self) -> str:
        """The field in the resource's spec."""
        return f"target.{self.name}"


_WORKER: Final = (Engine.WORKER,)
_SPARK: Final = (Engine.SPARK,)


def _require_one(schema: dict[str, Any]) -> None:
    """Give the schema the rule that exactly one of its fields is set."""
    names = ", ".join(f"has(self.{name})" for name in schema["properties"])
    schema.update(rules(rule(f"[{names}].filter(x, x).size() == 1", _one_target(schema["properties"]))))


def _one_target(names: Iterable[str]) -> str:
    return "set exactly one target: " + ", ".join(names)


class Target(SpecModel):
    """What to do with messages: exactly one of the fields. Each is one line of the registry of targets."""

    model_config = ConfigDict(json_schema_extra=_require_one)

    sql: Annotated[SqlTarget | None, TargetKind((Engine.WORKER, Engine.SPARK), transactional=True)] = Field(
        None, description="A statement in the checkpoint's transaction."
    )
    python: Annotated[PythonTarget | None, TargetKind(_WORKER, transactional=True)] = Field(
        None, description="A Python function (engine Worker)."
    )
    rabbitmq: Annotated[RabbitmqTarget | None, TargetKind(_WORKER, transactional=False)] = Field(
        None, description="RabbitMQ (engine Worker)."
    )
    kafka: Annotated[KafkaTarget | None, TargetKind(_WORKER, transactional=False, own_transactions=True)] = Field(
        None, description="Kafka (engine Worker)."
    )
    rabbitmq_stream: Annotated[RabbitmqStreamTarget | None, TargetKind(_WORKER, transactional=False, numbers=True)] = (
        Field(None, description="A stream of RabbitMQ, by the streams' own protocol (engine Worker).")
    )
    http: Annotated[HttpTarget | None, TargetKind(_WORKER, transactional=False)] = Field(
        None, description="HTTP: each message posted as a CloudEvent (engine Worker)."
    )
    log: Annotated[LogTarget | None, TargetKind(_WORKER, transactional=False)] = Field(
        None, description="A JSON line on standard output for each message (engine Worker)."
    )
    parquet: Annotated[ParquetTarget | None, TargetKind(_SPARK, transactional=True)] = Field(
        None, description="Parquet files (engine Spark)."
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        """As the CRD's rule: a worker's file may name a target of a later version."""
        if sum(getattr(self, kind.attribute) is not None for kind in TARGETS) != 1:
            raise ValueError(_one_target(kind.name for kind in TARGETS))
        return self

    @property
    def kind(self) -> TargetKind:
        """The line of the registry of the target that is set."""
        return next(kind for kind in TARGETS if getattr(self, kind.attribute) is not None)

    @property
    def chosen(self) -> SpecModel:
        """The target that is set."""
        found: SpecModel = getattr(self, self.kind.attribute)
        return found

    @property
    def connection(self) -> Connection | None:
        """What is mounted as connection `target`: another database, or what is outside of databases."""
        found: Connection | None = getattr(self.chosen, "connection", None)
        return found

    @property
    def database(self) -> Connection | None:
        """The other database that holds effects and checkpoint; None: the source's does."""
        return self.connection if self.kind.transactional else None

    @property
    def config_map(self) -> ObjectRef | None:
        """What is mounted as the user's Python files."""
        return None if self.python is None else self.python.config_map_ref


def _read_registry() -> Iterator[TargetKind]:
    for name, field in Target.model_fields.items():
        (kind,) = (each for each in field.metadata if isinstance(each, TargetKind))
        (model,) = (each for each in get_args(field.annotation) if each is not NoneType)
        yield replace(kind, name=to_camel(name), attribute=name, connects="connection" in model.model_fields)


TARGETS: Final = tuple(_read_registry())
"""Every target there is, in the order of the resource's fields."""
