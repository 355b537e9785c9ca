"""Messages written into Parquet files by the tasks that read them.

Spark would take each message into its JVM, as a row, and write it from there: three times the processor time that
reading takes. Where the messages are written as they are, Arrow has their columns already. The files are such as Spark
writes: the same types, and Spark's own note of the schema.
"""

from __future__ import annotations

import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq

from outbox_spark.columns import MESSAGE_SCHEMA, message_arrow_schema
from outbox_spark.reader import RangeReader

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from outbox_core.config import ProcessorConfig
    from outbox_spark.offsets import OffsetRange
    from outbox_spark.options import ReadOptions

_SPARK_SCHEMA: Final = "org.apache.spark.sql.parquet.row.metadata"
_CODEC: Final = "spark.sql.parquet.compression.codec"
_CODECS: Final = {"uncompressed": "none", "lz4_raw": "lz4"}
"""Of Spark's names those that Arrow has others for."""
_REPEATED: Final = (
    "transaction_id", "message_type", "publication_id", "partition_key", "metadata", "scheduled",
)  # fmt: skip
"""Columns whose values come again; a dictionary of the others would be as large as they are."""


def writes_as_read(config: ProcessorConfig) -> bool:
    """Say whether all that a processor does is to write messages into files."""
    target = config.target
    return target is not None and target.parquet is not None and config.plan.application is None


def write_messages(session: SparkSession, options: ReadOptions, whole: OffsetRange, hidden: Path) -> dict[Path, int]:
    """Have tasks write a range's messages into a new directory; return the files of those that Spark counts as done.

    Each file with its number of rows, in the order of the messages.
    """
    pieces = RangeReader(options).fetch_pieces(whole)
    codec = str(session.conf.get(_CODEC)).lower()
    write = partial(write_piece, options, str(hidden), _CODECS.get(codec, codec))
    done = session.sparkContext.parallelize(pieces, len(pieces)).map(write).collect()
    return {hidden / name: rows for name, rows in done}


def write_piece(options: ReadOptions, hidden: str, codec: str, piece: OffsetRange) -> tuple[str, int]:
    """Write a piece's messages into a file of a name that no other attempt has; runs on an executor."""
    directory, name, rows = Path(hidden), f"part-{uuid.uuid4().hex}.parquet", 0
    directory.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(
        directory / name, message_arrow_schema(), compression=codec, use_dictionary=list(_REPEATED), store_schema=False,
        use_deprecated_int96_timestamps=True,
    ) as writer:  # fmt: skip
        writer.add_key_value_metadata({_SPARK_SCHEMA: MESSAGE_SCHEMA.json()})
        for page in RangeReader(options).read(piece):
            writer.write_batch(page)
            rows += page.num_rows
    return name, rows
