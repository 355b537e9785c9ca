"""The classes that Spark's JVMs load, mapped ready-made from a file (application class-data sharing, JEP 350).

Loading and checking Spark's classes is most of what a JVM does before its first batch: 15 s of CPU time become 9 s. The
image writes the file as it is built, and `session` names it to the driver's JVM and to the executors'. A JVM whose
class path or Java is another one than the file's ignores it: an `extraClassPath` costs the time again, no more.

    SPARK_HOME=... python classes.py FILE

runs a small query in a JVM of its own, which writes the classes that it loaded as it ends. The file belongs to Spark's
class path, to the letter. This module needs none of the others: an image writes the file before it has them, and not
again for each of their changes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CLASSES: Final = "OUTBOX_SPARK_CLASSES"
"""Environment variable: the file, where an image has one."""
_QUIET: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
_ON_KUBERNETES: Final = (
    "deploy.k8s.KubernetesExecutorConf",
    "deploy.k8s.SparkKubernetesClientFactory",
    "scheduler.cluster.k8s.ExecutorPodsAllocator",
    "scheduler.cluster.k8s.ExecutorPodsLifecycleManager",
    "scheduler.cluster.k8s.ExecutorPodsPollingSnapshotSource",
    "scheduler.cluster.k8s.ExecutorPodsWatchSnapshotSource",
    "scheduler.cluster.k8s.KubernetesClusterManager",
    "scheduler.cluster.k8s.KubernetesClusterSchedulerBackend",
    "scheduler.cluster.k8s.KubernetesExecutorBackend",
    "scheduler.cluster.k8s.KubernetesExecutorBuilder",
)
"""Below `org.apache.spark`: what a session with threads for executors does not load."""


def map_classes(file: str) -> str:
    """Write the options of a JVM that maps the file; where it does not fit the JVM goes without, and says nothing.

    Mapped where it was written for (relocation mode 0) its 200 MB are pages that JVMs share and the kernel may drop;
    moved elsewhere, which newer JVMs do for the sake of unknown addresses, they would be each pod's own memory.
    """
    return f"-XX:SharedArchiveFile={file} -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0 {_QUIET}"


def write_classes(file: Path) -> None:
    """Run the small query in a JVM of its own, which writes the file as it ends.

    Raises:
        RuntimeError: the JVM did not; otherwise only slow starts would show it.

    """
    from pyspark.sql import SparkSession

    file.unlink(missing_ok=True)

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Where an image is built the machine's name cannot be resolved.
    os.environ |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_LOCAL_HOSTNAME": "localhost"}
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "1")
        .config("spark.driver.extraJavaOptions", f"-XX:+UseSerialGC -XX:ArchiveClassesAtExit={file} {_QUIET}")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    with tempfile.TemporaryDirectory() as folder:
        _run_query(session, Path(folder))
    gateway: Any = session.sparkContext._gateway  # noqa: SLF001 - PySpark has no other way to its JVM
    _load_kubernetes(gateway.jvm)
    session.stop()
    gateway.shutdown()
    # Its JVM ends with its standard input.
    gateway.proc.stdin.close()
    gateway.proc.wait(timeout=300)
    if not file.exists():
        raise RuntimeError(f"the JVM ended and left no {file}")


def _run_query(session: SparkSession, folder: Path) -> None:
    """Run the kind of query that the pipeline runs."""
    from pyspark.sql import functions as f

    def handle(batch: DataFrame, _number: int) -> None:
        batch.groupBy(f.date_trunc("minute", "at").alias("minute")).agg(f.count("*")).collect()
        batch.mapInArrow(lambda batches: batches, batch.schema).count()

    source, rows = str(folder / "source"), session.range(100).withColumn("at", f.current_timestamp())
    rows.write.parquet(source)
    query = session.readStream.schema(rows.schema).parquet(source).writeStream.foreachBatch(handle)
    query.option("checkpointLocation", str(folder / "query")).trigger(availableNow=True).start().awaitTermination(120)


def _load_kubernetes(jvm: Any) -> None:
    """Load what asks Kubernetes for executors: Spark's classes by name, its client's by a request to a closed port."""
    for name in _ON_KUBERNETES:
        jvm.java.lang.Class.forName(f"org.apache.spark.{name}")
    nobody = jvm.io.fabric8.kubernetes.client.ConfigBuilder().withMasterUrl("https://127.0.0.1:1")
    settings = nobody.withRequestRetryBackoffLimit(0).withAutoConfigure(False).build()
    client = jvm.io.fabric8.kubernetes.client.KubernetesClientBuilder().withConfig(settings).build()
    pod = jvm.io.fabric8.kubernetes.api.model.PodBuilder().withNewMetadata().withName("none").endMetadata().build()
    jvm.io.fabric8.kubernetes.client.utils.Serialization.unmarshal(
        jvm.io.fabric8.kubernetes.client.utils.Serialization.asYaml(pod), pod.getClass()
    )
    with suppress(Exception):  # no server answers
        client.pods().inNamespace("none").resource(pod).create()
    client.close()


if __name__ == "__main__":
    write_classes(Path(sys.argv[1]))
