"""The classes that Spark's JVMs load, mapped ready-made from a file (application class-data sharing, JEP 350).

Tests start dozens of JVMs, and loading Spark's classes is most of what each does: 15 s of CPU time become 9 s. A JVM
whose class path or Java is another one than the file's ignores it.

    python -m tests.support.spark_classes SPARK_HOME FILE

runs a small query and writes the classes that it loaded. `tests/cluster/parts/spark.sh` keeps both in the cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
"""Tests compute little."""


def write_classes(spark_home: Path, file: Path) -> None:
    """Run the small query in a JVM of its own, which writes the file as it ends."""
    os.environ |= {"SPARK_HOME": str(spark_home), "PYSPARK_PYTHON": sys.executable}
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.driver.extraJavaOptions", f"{QUICK} -XX:ArchiveClassesAtExit={file}")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    with tempfile.TemporaryDirectory() as folder:
        run_query(session, Path(folder))
    gateway = session.sparkContext._gateway
    session.stop()
    assert gateway is not None
    gateway.shutdown()
    # Its JVM ends with its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=300)


def run_query(session: SparkSession, folder: Path) -> None:
    """The kind of query that the pipeline runs."""
    from pyspark.sql import functions as f

    def handle(batch: DataFrame, _number: int) -> None:
        batch.groupBy(f.date_trunc("minute", "at").alias("minute")).agg(f.count("*")).collect()
        batch.mapInArrow(lambda batches: batches, batch.schema).count()

    source, rows = str(folder / "source"), session.range(100).withColumn("at", f.current_timestamp())
    rows.write.parquet(source)
    query = session.readStream.schema(rows.schema).parquet(source).writeStream.foreachBatch(handle)
    query.option("checkpointLocation", str(folder / "query")).trigger(availableNow=True).start().awaitTermination(120)


if __name__ == "__main__":
    write_classes(Path(sys.argv[1]), Path(sys.argv[2]))
