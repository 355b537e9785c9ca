"""What to do with messages."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import ConfigDict, Field, model_validator

from outbox_core.spec.base import Connection, ObjectRef, SpecModel, rule, rules

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


class PythonTarget(SpecModel):
    """A Python function called once for every batch."""

    connection: Connection | None = Field(None, description=_ELSEWHERE)
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
        description="A message that no queue takes fails, and that counts as an attempt. False: the broker drops it "
        "silently.",
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
_ONE_TARGET: Final = "set exactly one target: " + ", ".join(TARGETS)


class Target(SpecModel):
    """What to do with messages: exactly one of the fields."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[" + ", ".join(f"has(self.{t})" for t in TARGETS) + "].filter(x, x).size() == 1",
                _ONE_TARGET,
            )
        )
    )

    sql: SqlTarget | None = Field(None, description="A statement in the checkpoint's transaction.")
    python: PythonTarget | None = Field(None, description="A Python function (engine Worker).")
    rabbitmq: RabbitmqTarget | None = Field(None, description="RabbitMQ (engine Worker).")
    log: LogTarget | None = Field(None, description="A JSON line on standard output for each message (engine Worker).")
    parquet: ParquetTarget | None = Field(None, description="Parquet files (engine Spark).")

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        """As the CRD's rule: a worker's file may name a target of a later version."""
        if sum(getattr(self, name) is not None for name in TARGETS) != 1:
            raise ValueError(_ONE_TARGET)
        return self

    @property
    def database(self) -> Connection | None:
        """The other database that holds effects and checkpoint; None: the source's does."""
        chosen = self.sql or self.python
        return None if chosen is None else chosen.connection

    @property
    def connection(self) -> Connection | None:
        """What is mounted as connection `target`: that database, or a broker."""
        return self.database if self.rabbitmq is None else self.rabbitmq.connection
