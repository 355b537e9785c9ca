"""The Spark session of a processor's driver: which configuration, from which environment.

The driver runs in client mode inside its own pod; nothing is submitted. What Spark must know of Kubernetes the
operator writes into `spark.config` (`spark.master`, namespace, image, `spark.kubernetes.executor.podTemplateFile`,
instances, cores, memory, ports). The pod adds what it learns at its start: `POD_NAME` (executors are owned by it
and go with it) and `POD_IP` (where they reach the driver). Without `spark.master` executors are threads of the
driver, `local[n]`: n from `OUTBOX_SPARK_LOCAL_CORES`, 2. `OUTBOX_SPARK_DRIVER_MEMORY` is the heap of the driver's
JVM, 512m; the pod needs about 500 MB beside it. `OUTBOX_SPARK_CLASSES` is the image's file of ready-made classes.

The operator chooses ports (rendering/pods.py) and the chart the rights of the driver's service account
(templates/spark-driver-role.yaml); executors need none. Executors' template mounts the same connection files, ConfigMap
and volumes at the same paths as the driver's pod.

`build_configuration` is PURE.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.sql import SparkSession

from outbox_core.errors import TransientError
from outbox_core.report import Reason
from outbox_spark.classes import CLASSES, map_classes
from outbox_spark.source import OutboxDataSource
from outbox_spark.writing.files import writes_as_read

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_core.config import ProcessorConfig

_TASK_ATTEMPTS: Final = 4
_PREFIX_ROOM: Final = 40
_KUBERNETES: Final = "k8s://"
_DRIVER_OPTIONS: Final = "spark.driver.extraJavaOptions"
_EXECUTOR_OPTIONS: Final = "spark.executor.extraJavaOptions"
_LOGGING: Final = f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}"
"""JSON, like the worker's own log; executors are of the same image."""
_QUICK: Final = "-XX:+UseSerialGC"
_QUICKEST: Final = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"
"""A JVM that computes no rows, as a driver that only plans, starts with half the CPU time (measured: 9.3 s in place of
16.8 s)."""
_FILE_MANAGER: Final = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Of the query checkpoint directory, which is on a mounted volume. The one that Spark takes by itself runs `readlink`
18 times for each micro-batch, each a process; of files both do the same with their renames."""
_PREFIX: Final = "spark.kubernetes.executor.podNamePrefix"


def build_configuration(config: ProcessorConfig, environment: Mapping[str, str], nonce: str) -> dict[str, str]:
    """Choose Spark's configuration: our defaults, the user's `spark.config` over them, and over both what must be so.

    `nonce`, a few random letters and digits, is in the executors' names: those of an earlier life of this pod may still
    be going.
    """
    chosen = {
        "spark.app.name": f"outbox-{config.processor_id}",
        "spark.driver.memory": environment.get("OUTBOX_SPARK_DRIVER_MEMORY", "512m"),
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # The query is planned while executors come; a batch that none comes for says so.
        "spark.scheduler.minRegisteredResourcesRatio": "0",
        "spark.sql.shuffle.partitions": str(config.plan.partitions),
        "spark.sql.streaming.checkpointFileManagerClass": _FILE_MANAGER,
    }
    chosen |= config.plan.config
    executor = _QUICKEST if writes_as_read(config) else _QUICK
    driver = _QUICKEST if runs_on_kubernetes(chosen) else executor
    # Executors are of the same image.
    classes = map_classes(environment[CLASSES]) if environment.get(CLASSES) else ""
    for key, ours in ((_DRIVER_OPTIONS, driver), (_EXECUTOR_OPTIONS, executor)):
        chosen[key] = " ".join(filter(None, (ours, classes, _LOGGING, chosen.get(key))))
    return chosen | _REQUIRED | _place(chosen, environment, nonce)


_REQUIRED: Final = {
    # Rows can be large: what is between Spark and Python is bounded by bytes.
    "spark.sql.execution.arrow.maxBytesPerBatch": "16m",
    # A batch without messages would have effects that no checkpoint stands for.
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # A query that is to end is waited for: what still ran of it would empty the staging table of the next one.
    "spark.sql.streaming.stopTimeout": "0",
    # What is staged is not compared by a local time zone.
    "spark.sql.session.timeZone": "UTC",
}


def runs_on_kubernetes(configuration: Mapping[str, str]) -> bool:
    """Say whether executors are pods of their own."""
    return configuration.get("spark.master", "").startswith(_KUBERNETES)


def _place(chosen: Mapping[str, str], environment: Mapping[str, str], nonce: str) -> dict[str, str]:
    """Say where driver and executors are."""
    master = chosen.get("spark.master", "")
    if not master:
        cores = environment.get("OUTBOX_SPARK_LOCAL_CORES", "2")
        return {"spark.master": f"local[{cores},{_TASK_ATTEMPTS}]", "spark.driver.host": "127.0.0.1"}
    if not runs_on_kubernetes(chosen):
        return {}
    learned = {
        "spark.kubernetes.driver.pod.name": environment.get("POD_NAME", ""),
        # Not bindAddress: the driver binds to all of its pod's addresses.
        "spark.driver.host": environment.get("POD_IP", ""),
        _PREFIX: f"{chosen.get(_PREFIX, 'outbox')[:_PREFIX_ROOM].rstrip('-')}-{nonce}",
    }
    return {key: value for key, value in learned.items() if value}


def start_session(configuration: Mapping[str, str]) -> SparkSession:
    """Start the driver's JVM and session, with the data source `outbox` known to it.

    Executors use the Python that `PYSPARK_PYTHON` names; without it this one, which is right for threads.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # The caller reports what it says; a JVM that went away makes it say nothing else.
    logging.getLogger("py4j").setLevel(logging.CRITICAL)
    session = SparkSession.builder.config(map=dict(configuration)).getOrCreate()
    session.sparkContext.setLogLevel("WARN")
    session.dataSource.register(OutboxDataSource)
    return session


def is_alive(session: SparkSession) -> bool:
    """Is the driver's JVM still there? Without it a process cannot get another one."""
    try:
        return not session.sparkContext._jsc.sc().isStopped()  # noqa: SLF001
    except Exception:  # noqa: BLE001 - every error means that it does not answer
        return False


def count_executors(session: SparkSession) -> int | None:
    """Count live executors; None where they are threads of the driver."""
    context = session.sparkContext
    if (context.master or "").startswith("local["):
        return None
    known = context._jsc.sc().getExecutorMemoryStatus().size()  # noqa: SLF001 - PySpark offers no other way
    return max(int(known) - 1, 0)  # the driver counts itself


class SessionStarter:
    """Starts the Spark session once, in a thread of its own, so that waiting for it can be interrupted."""

    def __init__(self, start: Callable[[], SparkSession]) -> None:
        self._start = start
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.session: SparkSession | None = None
        """The session, once there is one."""

    def begin(self) -> None:
        """Start it, unless it is started already."""
        if self._thread is None:
            self._error = None
            self._thread = threading.Thread(target=self._run, name="spark-session", daemon=True)
            self._thread.start()

    def is_settled(self, wait: float | None) -> bool:
        """Say whether it is started, or could not be; wait so many seconds for it at most."""
        if self._thread is None:
            return True
        self._thread.join(wait)
        return not self._thread.is_alive()

    def get(self) -> SparkSession:
        """Return the session, once it is settled.

        Raises:
            TransientError: it could not be started; it may be begun again.

        """
        self.is_settled(None)
        if self.session is None:
            self._thread = None
            raise TransientError(
                f"the Spark session cannot be started: {str(self._error)[:400]}",
                reason=Reason.TARGET_UNAVAILABLE,
                detail=str(self._error)[:4000],
            ) from self._error
        return self.session

    def _run(self) -> None:
        try:
            self.session = self._start()
        except BaseException as error:  # noqa: BLE001 - told to the waiting thread
            self._error = error
