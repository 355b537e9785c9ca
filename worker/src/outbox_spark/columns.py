"""Columns between PostgreSQL, Arrow and Spark: the message's schema, and the types of a staging table. PURE.

A Spark string can be JSON or text; which it is stands in the field's metadata, that Spark carries along while a
column is only selected or renamed. So `data` read from the outbox and staged again is jsonb for the target's
statement, and `transaction_id` is xid8 again, although Spark has neither type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa

    from outbox_core.errors import HandlerError

TYPE_KEY: Final = "outbox.type"
"""Key of a field's metadata that names its PostgreSQL type."""

_DECIMAL_OF_XID8: Final = spark.DecimalType(20, 0)
"""xid8 is unsigned and 64 bits wide: a Spark long cannot hold every one."""


def _field(name: str, data_type: spark.DataType, postgres: str) -> spark.StructField:
    return spark.StructField(name, data_type, nullable=True, metadata={TYPE_KEY: postgres})


MESSAGE_SCHEMA: Final = spark.StructType(
    [
        _field("position", spark.LongType(), "bigint"),
        _field("transaction_id", _DECIMAL_OF_XID8, "xid8"),
        _field("message_id", spark.StringType(), "text"),
        _field("message_type", spark.StringType(), "text"),
        _field("publication_id", spark.StringType(), "text"),
        _field("partition_key", spark.StringType(), "text"),
        _field("data", spark.StringType(), "jsonb"),
        _field("metadata", spark.StringType(), "jsonb"),
        _field("scheduled", spark.TimestampType(), "timestamptz"),
    ]
)
"""What `format("outbox")` reads, in the order of the relation `batch` of a worker's SQL target."""

_SIMPLE: Final[dict[type[spark.DataType], str]] = {
    spark.BooleanType: "boolean",
    spark.ByteType: "smallint",
    spark.ShortType: "smallint",
    spark.IntegerType: "integer",
    spark.LongType: "bigint",
    spark.FloatType: "real",
    spark.DoubleType: "double precision",
    spark.StringType: "text",
    spark.VarcharType: "text",
    spark.CharType: "text",
    spark.BinaryType: "bytea",
    spark.DateType: "date",
    spark.TimestampType: "timestamptz",
    spark.TimestampNTZType: "timestamp",
}
_FROM_METADATA: Final = frozenset({"bigint", "xid8", "text", "jsonb", "timestamptz"})
_AS_JSON: Final = (spark.StructType, spark.ArrayType, spark.MapType)


def message_arrow_schema() -> pa.Schema:
    """The Arrow schema that Spark demands of a reader, to the field."""
    return to_arrow_schema(MESSAGE_SCHEMA, timezone="UTC")


def is_nested(field: spark.StructField) -> bool:
    """Is the column staged as JSON, because PostgreSQL has no such type?"""
    return isinstance(field.dataType, _AS_JSON)


def postgres_type(field: spark.StructField) -> str:
    """Choose the staging column's type.

    Raises:
        HandlerError: there is none for it; the message names the column and what to do.

    """
    named = (field.metadata or {}).get(TYPE_KEY)
    if named in _FROM_METADATA:
        return str(named)
    if isinstance(field.dataType, spark.DecimalType):
        return f"numeric({field.dataType.precision},{field.dataType.scale})"
    if is_nested(field):
        return "jsonb"
    found = _SIMPLE.get(type(field.dataType))
    if found is None:
        raise _refusal(
            f"column {field.name!r} is {field.dataType.simpleString()}, which has no PostgreSQL type: cast it in the "
            "application, for example to string"
        )
    return found


def staging_columns(schema: spark.StructType) -> tuple[tuple[str, str], ...]:
    """Names and types of a staging table for rows of this schema.

    Raises:
        HandlerError: no columns, a name PostgreSQL would not keep apart from another, or a type it does not have.

    """
    columns = tuple((field.name, postgres_type(field)) for field in schema.fields)
    names = [name for name, _ in columns]
    if not names or len(set(names)) != len(names) or any(not n or len(n.encode()) > 63 or "\0" in n for n in names):
        raise _refusal(f"columns {names} cannot be staged: PostgreSQL wants distinct names of 1 to 63 bytes")
    return columns


def _refusal(message: str) -> HandlerError:
    # Spark asks for the schema alone in a process of its own: it shall not load the models that errors need.
    from outbox_core.errors import HandlerError

    return HandlerError(message)
