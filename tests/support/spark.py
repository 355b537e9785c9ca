"""A local Spark session as a notebook has it, and drivers as real processes with executors in threads or processes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from outbox_spark.classes import CLASSES, map_classes
from tests.support.servers.postgres import free_port, wait_until
from tests.support.worker import Worker, Workers, build_config

if TYPE_CHECKING:
    from tests.support.servers.postgres import Database

SPARK_HOME = Path(sys.prefix) / "spark"
"""A copy of Spark whose classes are ready to be mapped (`tests/tools/cluster/parts/spark.sh`)."""
OPTIONS = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""Of every JVM that the tests start: tests compute little."""
PATIENCE = 240.0
"""Seconds for what takes 10 on a free machine: a JVM, a session, the first Python workers."""

AGGREGATE = """
from pyspark.sql import functions as f

PER_MINUTE = '''
    INSERT INTO public.per_minute AS t (minute, orders, total)
    SELECT minute, orders, total FROM batch
    ON CONFLICT (minute) DO UPDATE SET orders = t.orders + excluded.orders, total = t.total + excluded.total
'''

def handle(messages, effects):
    order = f.from_json("data", "n int, total int")
    minutes = messages.groupBy(f.date_trunc("minute", "scheduled").alias("minute")).agg(
        f.count("*").alias("orders"), f.sum(order.total).alias("total")
    )
    effects.sql(minutes, PER_MINUTE)
    effects.parquet(messages, {path!r})
"""
"""The demo's kind of application: aggregates by upsert, and the messages as files."""


def classes() -> Path:
    """The file of ready-made classes, by the path that it was written with."""
    return SPARK_HOME.resolve() / "classes.jsa"


def start_notebook_session() -> Any:
    """A session as a person has it: nothing of the operator's."""
    from pyspark.sql import SparkSession

    from outbox_spark.source import OutboxDataSource

    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(SPARK_HOME.resolve())}
    session = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.memory", "768m")
        .config("spark.driver.extraJavaOptions", f"{OPTIONS} {map_classes(str(classes()))}")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    session.dataSource.register(OutboxDataSource)
    return session


class Orders:
    """Producers' side of a test, and a look at what the aggregating application made of it."""

    def __init__(self, database: Database, files: Path) -> None:
        self.files = files
        self.connection = database.direct()
        self.database = database
        self.connection.execute(
            "CREATE TABLE public.per_minute (minute timestamptz PRIMARY KEY, orders int, total int)"
        )
        self.produced = 0

    def produce(self, count: int, *, message_type: str = "OrderPlaced") -> None:
        self.connection.execute(
            "INSERT INTO outbox.messages (partition_key, message_type, data) "
            "SELECT 'order-' || n %% 7, %s, jsonb_build_object('n', n, 'total', n * 10) "
            "FROM generate_series(%s::int, %s::int) AS n",
            (message_type, self.produced + 1, self.produced + count),
        )
        self.produced += count

    def handled(self) -> int:
        row = self.connection.execute("SELECT coalesce(sum(orders), 0) FROM public.per_minute").fetchone()
        return int(row[0]) if row else 0

    def total(self) -> int:
        row = self.connection.execute("SELECT coalesce(sum(total), 0) FROM public.per_minute").fetchone()
        return int(row[0]) if row else 0

    def stored(self) -> str | None:
        row = self.connection.execute(
            "SELECT last_processed_transaction_id::text || ':' || last_processed_position "
            "FROM outbox.processor_checkpoints"
        ).fetchone()
        return str(row[0]) if row else None

    def has_live_lease(self) -> bool:
        row = self.connection.execute(
            "SELECT count(*) FROM outbox.processor_leases WHERE expires_at > clock_timestamp()"
        ).fetchone()
        return bool(row and row[0])

    def codes(self) -> list[int]:
        rows = self.connection.execute("SELECT code FROM outbox.processor_conflicts ORDER BY id").fetchall()
        return [int(row[0]) for row in rows]

    def positions_in_files(self) -> list[int]:
        """What a reader of the directory sees; hidden files are passed over, as by Spark."""
        import pyarrow.dataset as ds

        if not any(self.files.glob("*.parquet")):
            return []
        return sorted(ds.dataset(self.files, format="parquet").to_table(columns=["position"]).column(0).to_pylist())

    def check_exact(self) -> None:
        """Every message counted once in the aggregates, and once in the files (named after the commit)."""
        rows = self.connection.execute("SELECT position FROM outbox.messages ORDER BY 1").fetchall()
        assert self.handled() == self.produced
        assert self.total() == 10 * self.produced * (self.produced + 1) // 2
        expected = [row[0] for row in rows]
        wait_until(lambda: len(self.positions_in_files()) >= len(expected), "all files have their names", 10.0)
        assert self.positions_in_files() == expected


def spark_config(database: Database, home: Path, **fields: Any) -> dict[str, Any]:
    """The operator's file for a Spark processor with the application `orders`."""
    spark = {
        "trigger": {"processingTime": "200ms"},
        "queryCheckpointPath": str(home / "query"),
        "config": {"spark.driver.extraJavaOptions": OPTIONS},
        "application": {"module": "orders"},
    } | fields.pop("spark", {})
    target = fields.pop("target", None)
    delivery = {"batchSize": 100, "leaseDuration": "5s", "timeout": "2m"} | fields.pop("delivery", {})
    if target is not None:
        spark.pop("application")
    config = build_config(database, target or {}, engine="Spark", spark=spark, delivery=delivery, **fields)
    return config if target is not None else {key: value for key, value in config.items() if key != "target"}


class SharedJvm:
    """A JVM for drivers that run one after the other: starting one is most of what a driver costs.

    Each driver starts a session of its own there, and stops it when it ends. A driver that is to be killed has a JVM of
    its own: this one would go on with its query.
    """

    def __init__(self, folder: Path) -> None:
        """Keep where its log goes; it is started for the first driver."""
        self._log = folder / "jvm.log"
        self._gateway: Any = None

    def environment(self) -> dict[str, str]:
        """Return the variables that lead PySpark to it."""
        if self._gateway is None:
            self._gateway = self._start()
        parameters = self._gateway.java_parameters
        return {"PYSPARK_GATEWAY_PORT": str(parameters.port), "PYSPARK_GATEWAY_SECRET": parameters.auth_token}

    def _start(self) -> Any:
        from pyspark import SparkConf
        from pyspark.java_gateway import launch_gateway

        os.environ["SPARK_HOME"] = str(SPARK_HOME.resolve())
        options = f"-XX:+UseSerialGC {OPTIONS} {map_classes(str(classes()))}"
        conf = SparkConf().set("spark.driver.memory", "512m").set("spark.driver.extraJavaOptions", options)
        with self._log.open("ab") as log:
            return launch_gateway(conf, {"stdout": log, "stderr": log})

    def stop(self) -> None:
        """End it; the next driver gets another one."""
        if self._gateway is not None:
            gateway, self._gateway = self._gateway, None
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(60)


@dataclass
class Drivers(Workers):
    """Starts Spark drivers over prepared files; a driver's JVM ends with it, unless it is a shared one."""

    environment: dict[str, str] = field(default_factory=dict)

    @override
    def launch(
        self,
        home: Path,
        *arguments: str,
        pod: str | None = None,
        environment: dict[str, str] | None = None,
        jvm: SharedJvm | None = None,
    ) -> Worker:
        port = free_port()
        command = [
            sys.executable, "-m", "outbox_spark", "--config", str(home / "processor.json"), "--connections",
            str(home / "connections"), "--handler", str(home / "handler"), "--termination-log",
            str(home / "termination-log"), "--port", str(port), *arguments,
        ]  # fmt: skip
        variables = os.environ | {"POD_NAME": pod or home.name, "POD_UID": f"uid-{home.name}"} | self.environment
        variables |= {"SPARK_HOME": str(SPARK_HOME.resolve()), CLASSES: str(classes())}
        if jvm is not None:
            variables |= jvm.environment()
        # A session of its own: what ends it is sent to the driver, not to its JVM and Python workers.
        with (home / "log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=variables | (environment or {}), cwd=home, start_new_session=True
            )
        worker = Worker(home, port, process)
        self.started.append(worker)
        return worker


def wait_handled(driver: Worker, orders: Orders, count: int) -> None:
    """Wait until so many orders are in the aggregates; fail with the driver's log."""
    try:
        wait_until(lambda: orders.handled() >= count or driver.process.poll() is not None, f"{count} handled", PATIENCE)
    except AssertionError as error:
        raise AssertionError(f"{error}: {orders.handled()}\n{driver.log()[-8000:]}") from error
    assert driver.process.poll() is None, driver.log()[-8000:]
