"""Spark's configuration from the operator's file and the pod's environment."""

from __future__ import annotations

from outbox_core.config import ProcessorConfig
from outbox_spark.session import build_configuration


def config(*, application: str | None = None, **spark_config: str) -> ProcessorConfig:
    named = {} if application is None else {"application": {"module": application}}
    return ProcessorConfig.model_validate(
        {
            "resource": {"cluster": "c", "namespace": "n", "name": "orders", "uid": "u"},
            "generation": 1,
            "processorId": "orders",
            "engine": "Spark",
            "source": {"connection": {"secretRef": {"name": "db"}}},
            "target": {"parquet": {"path": "/data"}},
            "spark": {"partitions": 3, "config": spark_config} | named,
        }
    )


def test_without_a_cluster_executors_are_threads_that_try_again():
    chosen = build_configuration(config(), {}, "x1")
    assert chosen["spark.master"] == "local[2,4]"
    assert chosen["spark.sql.shuffle.partitions"] == "3"


def test_on_kubernetes_the_pod_adds_its_name_and_address():
    asked = {
        "spark.master": "k8s://https://kubernetes.default.svc",
        "spark.kubernetes.executor.podNamePrefix": "orders-exec",
        "spark.driver.extraJavaOptions": "-Da=b",
    }
    chosen = build_configuration(config(**asked), {"POD_NAME": "orders-driver-0", "POD_IP": "10.0.0.7"}, "x1")
    assert chosen["spark.master"] == asked["spark.master"]
    assert chosen["spark.kubernetes.driver.pod.name"] == "orders-driver-0"
    assert chosen["spark.driver.host"] == "10.0.0.7"
    assert "spark.driver.bindAddress" not in chosen
    java = chosen["spark.driver.extraJavaOptions"].split()
    assert java[:2] == ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    assert java[-1] == "-Da=b", "what the user says comes last and wins"
    assert chosen["spark.kubernetes.executor.podNamePrefix"] == "orders-exec-x1", "earlier executors may still be going"


def test_what_the_image_has_ready_made_is_mapped_by_driver_and_executors():
    asked = {"spark.master": "k8s://https://kubernetes.default.svc", "spark.executor.extraJavaOptions": "-Da=b"}
    chosen = build_configuration(config(**asked), {"OUTBOX_SPARK_CLASSES": "/opt/outbox/classes.jsa"}, "x1")
    for key in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
        assert "-XX:SharedArchiveFile=/opt/outbox/classes.jsa" in chosen[key].split()
    assert chosen["spark.executor.extraJavaOptions"].split()[-1] == "-Da=b"
    without = build_configuration(config(**asked), {}, "x1")
    assert "SharedArchiveFile" not in without["spark.driver.extraJavaOptions"], "an image without the file"


def test_a_user_may_tune_and_may_not_break():
    asked = {
        "spark.sql.shuffle.partitions": "9",
        "spark.sql.streaming.noDataMicroBatches.enabled": "true",
        "spark.sql.streaming.stopTimeout": "1000",
    }
    chosen = build_configuration(config(**asked), {"OUTBOX_SPARK_DRIVER_MEMORY": "1g"}, "x1")
    assert chosen["spark.sql.shuffle.partitions"] == "9"
    assert chosen["spark.sql.streaming.noDataMicroBatches.enabled"] == "false"
    assert chosen["spark.sql.streaming.stopTimeout"] == "0"
    assert chosen["spark.driver.memory"] == "1g"


def test_jvms_that_compute_no_rows_compile_quickly():
    for application, quick in ((None, True), ("orders", False)):
        chosen = build_configuration(config(application=application), {}, "x1")
        for key in ("spark.driver.extraJavaOptions", "spark.executor.extraJavaOptions"):
            assert ("-XX:TieredStopAtLevel=1" in chosen[key].split()) is quick
