"""Reads new rows of the outbox by Spark's JDBC source, again and again, and writes them as Parquet files.

It remembers the last position in memory only: it has no checkpoint, no lease, and would pass over rows that commit
late. A floor, not a product.

Usage: spark_jdbc URI JDBC_URL DRIVER_JAR DIRECTORY HEAP
"""

from __future__ import annotations

import sys
import time

import psycopg
from pyspark.sql import SparkSession

_LOOK_SECONDS = 0.01
_COLUMNS = (
    "(SELECT position, transaction_id::text, message_id, message_type, publication_id, partition_key, data::text, "
    "metadata::text, scheduled FROM outbox.messages WHERE position > {} AND position <= {}) AS rows"
)


def main() -> None:
    """Run until it is ended."""
    uri, url, jar, directory, heap = sys.argv[1:]
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.driver.memory", heap)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", "-XX:+UseSerialGC")
        .config("spark.jars", jar)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    last = number = 0
    with psycopg.connect(uri, autocommit=True) as connection:
        print("ready", flush=True)
        while True:
            row = connection.execute("SELECT coalesce(max(position), 0) FROM outbox.messages").fetchone()
            newest = row[0] if row else 0
            if newest == last:
                time.sleep(_LOOK_SECONDS)
                continue
            number += 1
            session.read.jdbc(
                url, _COLUMNS.format(last, newest), "position", last + 1, newest + 1, 2,
                properties={"driver": "org.postgresql.Driver", "fetchsize": "10000"},
            ).write.parquet(f"file://{directory}/{number}")  # fmt: skip
            last = newest


if __name__ == "__main__":
    main()
