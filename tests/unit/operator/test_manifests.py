"""What is rendered: pods that meet `restricted`, no Secret's content, and a hash that moves only when pods must."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import yaml

from outbox_core.config import ProcessorConfig, Resolution, ResolutionAction
from outbox_core.spec.spark import SAID_BY_FIELDS, SAID_BY_OPERATOR
from outbox_operator.api.naming import DECISION_LABEL, TEMPLATE_LABEL, child_name, workload_name
from outbox_operator.api.observed import Role
from outbox_operator.crd import render_files
from outbox_operator.decision.hand_over import hand_over_job_name
from outbox_operator.decision.ownership import claim_job_name
from outbox_operator.rendering.manifests import (
    build_config,
    build_job,
    build_origin,
    build_owned,
    build_release,
    build_template,
    build_workload,
    format_config,
)
from outbox_operator.settings import Images
from tests.support.kubernetes.cluster import ROOT
from tests.unit.operator.building import UID, build_processor, template_hash

IMAGES = Images(worker="registry/worker:1", spark="registry/spark:1", driver_role="driver-role")
VOLUME = {"name": "data", "claimName": "orders-data", "mountPath": "/data"}
BROKER = {"rabbitmq": {"connection": {"secretRef": {"name": "broker"}}}}
SPARK: dict[str, Any] = {
    "engine": "Spark",
    "target": {"parquet": {"path": "/data/orders"}},
    "spark": {
        "volumes": [VOLUME],
        "application": {"module": "app", "configMapRef": {"name": "code"}},
        "executor": {"instances": 3, "memory": "1g", "podTemplate": {"spec": {"nodeSelector": {"disk": "ssd"}}}},
        "config": {"spark.sql.shuffle.partitions": "7", "spark.executor.instances": "99"},
    },
}
APART = {"sql": {"statement": "SELECT 1", "connection": {"secretRef": {"name": "reporting"}}}}
PROCESSORS = [
    pytest.param(build_processor(), id="worker"),
    pytest.param(build_processor(target=BROKER), id="broker"),
    pytest.param(build_processor(**SPARK), id="Spark"),
]


def pods_of(processor: Any, images: Images = IMAGES) -> list[dict[str, Any]]:
    workload = build_workload(processor, images, 1)
    job = build_job(processor, images, "try", Role.CLAIM)
    release = build_release(processor, images)
    pods = [manifest["spec"]["template"]["spec"] for manifest in (workload, job, release)]
    if processor.spec.spark is not None:
        (config_map,) = [m for m in build_owned(processor, images, 1, None, ()) if m["kind"] == "ConfigMap"]
        pods.append(yaml.safe_load(config_map["data"]["executor.yaml"])["spec"])
    return pods


@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_pod_meets_the_restricted_standard(processor: Any):
    for pod in pods_of(processor):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["enableServiceLinks"] is False
        for container in pod["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]


@pytest.mark.parametrize("processor", PROCESSORS)
def test_only_a_spark_driver_gets_a_token(processor: Any):
    tokens = [pod["automountServiceAccountToken"] for pod in pods_of(processor)]
    assert tokens[0] is (processor.spec.spark is not None)
    assert not any(tokens[1:])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_file_that_a_worker_reads_round_trips(processor: Any):
    resolution = Resolution(conflict_id=7, action=ResolutionAction.ACCEPT, pair="815:42")
    (config_map,) = [m for m in build_owned(processor, IMAGES, 1, resolution, ("gone",)) if m["kind"] == "ConfigMap"]
    read = ProcessorConfig.model_validate_json(config_map["data"]["processor.json"])
    assert read == build_config(processor, IMAGES, resolution, ("gone",))
    assert (read.processor_id, read.resource.uid, read.sweep_uids) == ("orders", "uid-1", ["gone"])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_every_owned_object_goes_with_the_resource_and_blocks_nothing(processor: Any):
    for manifest in build_owned(processor, IMAGES, 1, None, ()):
        (owner,) = manifest["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("uid-1", True, False)
        assert "finalizers" not in manifest["metadata"]


def test_secrets_are_mounted_as_files_and_named_nowhere_else():
    pod = build_workload(build_processor(target=BROKER), IMAGES, 1)["spec"]["template"]["spec"]
    secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "secret" in v}
    mounts = {m["name"]: m["mountPath"] for m in pod["containers"][0]["volumeMounts"]}
    name = IMAGES.keys.secret_name("orders", "uid-1")
    assert secrets == {"source-connection": "db", "target-connection": "broker", "operator-key": name}
    assert mounts["source-connection"] == "/etc/outbox/connections/source"
    assert mounts["target-connection"] == "/etc/outbox/connections/target"
    assert "secretKeyRef" not in json.dumps(pod)


def budgets_of(processor: Any, images: Images = IMAGES) -> list[dict[str, Any]]:
    return [each for each in build_owned(processor, images, 0, None, ()) if each["kind"] == "PodDisruptionBudget"]


def test_a_drain_takes_one_of_several_replicas_and_is_never_held_up_by_a_single_one():
    processor = build_processor(worker={"replicas": 2})
    (budget,) = budgets_of(processor)
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    workload = build_workload(processor, IMAGES, 2)["spec"]
    assert budget["spec"]["selector"] == workload["selector"]
    assert workload["selector"]["matchLabels"].items() <= workload["template"]["metadata"]["labels"].items()
    assert budgets_of(build_processor()) == budgets_of(build_processor(**SPARK)) == []
    assert budgets_of(processor, replace(IMAGES, budgets=False)) == [], "its installation makes its own"


def test_workers_are_spread_where_there_is_a_choice_and_a_user_may_say_how():
    pod = build_workload(build_processor(), IMAGES, 1)["spec"]["template"]
    spread = pod["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"] for each in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
    for each in spread:
        assert (each["maxSkew"], each["whenUnsatisfiable"]) == (1, "ScheduleAnyway")
        assert each["labelSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    own = {"topologyKey": "kubernetes.io/hostname", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule"}
    overlay = {"spec": {"topologySpreadConstraints": [own]}}
    changed = build_workload(build_processor(worker={"podTemplate": overlay}), IMAGES, 1)["spec"]["template"]["spec"]
    assert changed["topologySpreadConstraints"] == [own, spread[1]]


def test_images_by_digest_reach_every_pod():
    worker, spark = (f"registry/{name}@sha256:{'ab' * 32}" for name in ("worker", "spark"))
    images = replace(IMAGES, worker=worker, spark=spark)
    for processor in (build_processor(), build_processor(**SPARK)):
        made = [build_workload(processor, images, 1), build_job(processor, images, "try", Role.CLAIM)]
        found = [each["spec"]["template"]["spec"]["containers"][0]["image"] for each in made]
        assert found == [spark if processor.spec.spark is not None else worker, worker]
    plan = build_config(build_processor(**SPARK), images).spark
    assert plan is not None
    assert plan.config["spark.kubernetes.container.image"] == spark


def test_a_worker_never_has_one_pod_too_many():
    manifest = build_workload(build_processor(worker={"replicas": 2}), IMAGES, 2)
    assert manifest["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert build_workload(build_processor(**SPARK), IMAGES, 1)["kind"] == "StatefulSet"


@pytest.mark.parametrize(
    ("change", "replaces"),
    [
        pytest.param({"delivery": {"batchSize": 5}}, True, id="delivery"),
        pytest.param({"target": {"log": {}}}, True, id="target"),
        pytest.param({"worker": {"image": "other"}}, True, id="image"),
        pytest.param({"worker": {"podTemplate": {"metadata": {"labels": {"team": "shop"}}}}}, True, id="overlay"),
        pytest.param({"worker": {"replicas": 3}}, False, id="replicas"),
        pytest.param({"suspend": True}, False, id="suspend"),
        pytest.param({"handOverTo": {"namespace": "a", "name": "b"}}, False, id="hand-over"),
        pytest.param({"processorId": "orders"}, False, id="the name, written out"),
        pytest.param({"delivery": {"mode": "Ordered", "retry": {"maxAttempts": 10}}}, False, id="defaults"),
        pytest.param({"startFrom": {}}, False, id="defaults of a part"),
    ],
)
def test_pods_are_replaced_for_what_they_read(change: dict[str, Any], *, replaces: bool):
    changed = template_hash(build_processor(**change), IMAGES) != template_hash(build_processor(), IMAGES)
    assert changed is replaces


def test_a_worker_is_told_only_what_is_set():
    told = json.loads(format_config(build_config(build_processor(delivery={"batchSize": 5}), IMAGES)))
    assert told == {
        "resource": {"cluster": "here", "namespace": "shop", "name": "orders", "uid": UID},
        "generation": 3,
        "processorId": "orders",
        "source": {"connection": {"secretRef": {"name": "db"}}},
        "delivery": {"batchSize": 5},
        "target": {"sql": {"statement": "SELECT 1"}},
    }


def test_a_new_generation_or_decision_alone_replaces_no_pod():
    processor = build_processor()
    later = processor.model_copy(update={"generation": 99, "annotations": {"a": "b"}})
    assert template_hash(later, IMAGES) == template_hash(processor, IMAGES)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_corrected_decision_replaces_pods(processor: Any):
    def pods(label: str) -> dict[str, Any]:
        template: dict[str, Any] = build_owned(processor, IMAGES, 1, None, (), decision_label=label)[-1]["spec"][
            "template"
        ]
        return template

    first = pods("one")
    assert first["metadata"]["labels"][DECISION_LABEL] == "one"
    assert pods("another") != first
    assert first["metadata"]["labels"][TEMPLATE_LABEL] == pods("")["metadata"]["labels"][TEMPLATE_LABEL]


def test_the_users_settings_win_where_they_do_not_break_the_pods():
    plan = build_config(build_processor(**SPARK), IMAGES).spark
    assert plan is not None
    assert plan.config["spark.sql.shuffle.partitions"] == "7"
    assert plan.config["spark.executor.instances"] == "3"
    assert plan.config["spark.master"].startswith("k8s://")


def test_what_the_operator_says_in_place_of_a_setting_is_what_the_crd_refuses():
    """What lies below `spark.kubernetes.` is judged with the podTemplates."""

    def said(**config: str) -> dict[str, str]:
        plan = build_config(build_processor(**{**SPARK, "spark": {**SPARK["spark"], "config": config}}), IMAGES).spark
        assert plan is not None
        return plan.config

    settings = {key for key in said() if not key.startswith("spark.kubernetes.")}
    said_anyway = {key for key in settings if said(**{key: "asked"})[key] != "asked"}
    assert said_anyway == {*SAID_BY_FIELDS, *SAID_BY_OPERATOR}


def test_executors_mount_what_the_driver_mounts_and_take_their_overlay():
    processor = build_processor(**SPARK)
    executor = pods_of(processor)[-1]
    driver = pods_of(processor)[0]
    for name in ("data", "source-connection", "handler"):
        assert next(v for v in executor["volumes"] if v["name"] == name) == next(
            v for v in driver["volumes"] if v["name"] == name
        )
    assert executor["nodeSelector"] == {"disk": "ssd"}


def test_spark_gets_a_service_account_bound_to_the_one_role():
    owned = {m["kind"]: m for m in build_owned(build_processor(**SPARK), IMAGES, 1, None, ())}
    assert list(owned) == ["ConfigMap", "ServiceAccount", "RoleBinding", "Service", "StatefulSet"]
    assert owned["RoleBinding"]["roleRef"]["name"] == "driver-role"
    assert owned["Service"]["spec"]["clusterIP"] == "None"


def test_a_query_checkpoint_on_no_volume_lives_with_the_pod():
    bare = {**SPARK, "target": {"sql": {"statement": "SELECT 1"}}, "spark": {}}
    pod = build_workload(build_processor(**bare), IMAGES, 1)["spec"]["template"]["spec"]
    assert {"name": "query-checkpoint", "emptyDir": {}} in pod["volumes"]


@pytest.mark.parametrize(
    ("mount", "path", "held"),
    [
        ("/var/lib/outbox", "/var/lib/outbox/query", True),
        ("/var/lib/outbox/", "/var/lib/outbox/query", True),
        ("/var/lib/outbox/query", "/var/lib/outbox/query", True),
        ("/var/lib/out", "/var/lib/outbox/query", False),
    ],
)
def test_a_query_checkpoint_is_on_a_volume_by_whole_names_of_its_path(mount: str, path: str, *, held: bool):
    volumes = [{"name": "data", "claimName": "c", "mountPath": mount}]
    bare = {**SPARK, "target": {"sql": {"statement": "SELECT 1"}}}
    bare["spark"] = {"volumes": volumes, "queryCheckpointPath": path}
    pod = build_workload(build_processor(**bare), IMAGES, 1)["spec"]["template"]["spec"]
    assert ("query-checkpoint" not in [volume["name"] for volume in pod["volumes"]]) is held


@pytest.mark.parametrize("processor", PROCESSORS)
def test_where_the_cluster_assigns_users_no_pod_names_one(processor: Any):
    """As OpenShift does: its SCC `restricted-v2` refuses a pod with a user outside of its namespace's range."""
    unset = replace(IMAGES, user=None)
    for pod in pods_of(processor, unset):
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & set(pod["securityContext"])
    asked, named = (build_origin(processor, each, build_template(processor, each)) for each in (unset, IMAGES))
    assert (asked.spec, asked.installation == named.installation) == (named.spec, False), "the pods are replaced"


@pytest.mark.parametrize("length", [1, 20, 44, 45, 46, 52])
def test_names_fit_and_differ(length: int):
    name = "a" * length
    assert len(workload_name(build_processor(name=name, **SPARK))) <= 52
    assert len(child_name(name, "worker")) <= 63
    assert len(claim_job_name(name, 1_000_000)) <= 63, "one try in five minutes, for years"
    assert len(hand_over_job_name(build_processor(name=name))) <= 63
    assert child_name(name, "driver", 52) != child_name(name[:-1] + "b", "driver", 52)


def test_the_release_job_ends_by_itself_and_carries_no_work():
    job = build_release(build_processor(**SPARK), IMAGES)
    assert job["spec"]["suspend"], "until no pod of the resource may run any more"
    assert job["spec"]["activeDeadlineSeconds"] == 30
    assert job["spec"]["ttlSecondsAfterFinished"] == 10
    assert "ownerReferences" not in job["metadata"]
    template = job["spec"]["template"]
    (volume,) = [each for each in template["spec"]["volumes"] if each["name"] == "config"]
    carried = {
        "path": "processor.json",
        "fieldRef": {"fieldPath": "metadata.annotations['outbox-operator.dev/config']"},
    }
    assert volume == {"name": "config", "downwardAPI": {"items": [carried]}}
    config = json.loads(template["metadata"]["annotations"]["outbox-operator.dev/config"])
    assert (config["processorId"], config.get("spark")) == ("orders", None)


def test_a_job_runs_where_the_workers_run():
    overlay = {"spec": {"tolerations": [{"key": "x"}], "containers": [{"name": "worker", "image": "evil"}]}}
    processor = build_processor(worker={"podTemplate": overlay})
    pod = build_job(processor, IMAGES, "try", Role.CLAIM)["spec"]["template"]["spec"]
    assert pod["tolerations"] == [{"key": "x"}]
    assert pod["containers"][0]["image"] == IMAGES.worker


def test_the_generated_files_are_those_in_the_checkout():
    for path, text in render_files(ROOT).items():
        assert path.read_text() == text, f"{path}: run `make crds`"


def test_the_targets_database_is_mounted_like_a_broker_and_another_secret_replaces_the_pods():
    processor = build_processor(target=APART)
    for pod in pods_of(processor):
        secrets = {v["name"]: v["secret"]["secretName"] for v in pod["volumes"] if "connection" in v["name"]}
        assert secrets == {"source-connection": "db", "target-connection": "reporting"}
        mounts = {
            m["mountPath"]: m["readOnly"] for m in pod["containers"][0]["volumeMounts"] if "connection" in m["name"]
        }
        assert mounts == {"/etc/outbox/connections/source": True, "/etc/outbox/connections/target": True}
    other = {"sql": {**APART["sql"], "connection": {"secretRef": {"name": "warehouse"}}}}
    assert template_hash(processor, IMAGES) != template_hash(build_processor(target=other), IMAGES)


def test_a_rebuild_reaches_the_worker_and_a_change_of_it_replaces_the_pods():
    held, free = (
        build_processor(rebuildOf={"processorId": "v1", "swapStatement": "SELECT 1", "hold": hold})
        for hold in (True, False)
    )
    config = ProcessorConfig.model_validate_json(build_config(held, IMAGES).model_dump_json(by_alias=True))
    assert config.rebuild_of is not None
    assert (config.rebuild_of.processor_id, config.rebuild_of.hold) == ("v1", True)
    assert template_hash(held, IMAGES) != template_hash(free, IMAGES)


@pytest.mark.parametrize(
    "made",
    [
        build_release(build_processor(target=APART), IMAGES),
        build_job(build_processor(target=APART), IMAGES, "try", Role.CLAIM),
    ],
    ids=["release", "try"],
)
def test_a_job_asks_the_database_that_has_the_claim(made: dict[str, Any]):
    (text,) = made["spec"]["template"]["metadata"]["annotations"].values()
    assert ProcessorConfig.model_validate_json(text).has_remote_target
