"""Columns between Spark and PostgreSQL."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import types as spark

from outbox_core.errors import HandlerError
from outbox_spark.columns import MESSAGE_SCHEMA, message_arrow_schema, staging_columns
from outbox_spark.writing.staging import staging_name, to_csv


def test_messages_are_staged_as_what_they_were():
    assert staging_columns(MESSAGE_SCHEMA) == (
        ("position", "bigint"),
        ("transaction_id", "xid8"),
        ("message_id", "text"),
        ("message_type", "text"),
        ("publication_id", "text"),
        ("partition_key", "text"),
        ("data", "jsonb"),
        ("metadata", "jsonb"),
        ("scheduled", "timestamptz"),
    )


def test_arrow_and_spark_name_the_same_columns():
    assert message_arrow_schema().names == MESSAGE_SCHEMA.fieldNames()


@pytest.mark.parametrize(
    ("data_type", "postgres"),
    [
        (spark.StringType(), "text"),
        (spark.DecimalType(12, 3), "numeric(12,3)"),
        (spark.ArrayType(spark.LongType()), "jsonb"),
        (spark.StructType([spark.StructField("a", spark.LongType())]), "jsonb"),
        (spark.BinaryType(), "bytea"),
        (spark.TimestampNTZType(), "timestamp"),
    ],
)
def test_types(data_type, postgres):
    assert staging_columns(spark.StructType([spark.StructField("c", data_type)])) == (("c", postgres),)


def test_a_type_that_a_stranger_wrote_into_metadata_never_reaches_sql():
    field = spark.StructField("c", spark.LongType(), metadata={"outbox.type": "int); DROP TABLE x; --"})
    assert staging_columns(spark.StructType([field])) == (("c", "bigint"),)


def test_a_column_that_cannot_be_staged_is_named():
    with pytest.raises(HandlerError, match="column 'c' is interval day to second"):
        staging_columns(spark.StructType([spark.StructField("c", spark.DayTimeIntervalType())]))
    with pytest.raises(HandlerError, match="distinct names of 1 to 63 bytes"):
        staging_columns(spark.StructType([spark.StructField("c" * 64, spark.LongType())]))


def test_null_and_the_empty_string_stay_apart():
    batch = pa.RecordBatch.from_pydict({"a": ["", None, 'say "hi",\nbye'], "b": [1, None, 3]})
    assert to_csv(batch, "x") == b'"x","",1\n"x",,\n"x","say ""hi"",\nbye",3\n'


def test_the_name_of_a_staging_table_fits_and_tells_epochs_apart():
    names = {staging_name("p" * 500, epoch, (("a", "text"),)) for epoch in (1, 2**62)}
    assert len(names) == 2
    assert all(len(name) <= 63 for name in names)
