"""Overlays, drift, pod states, names in the store, the queue: small pure parts."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from pydantic import ValidationError

from outbox_operator.api.observed import Role
from outbox_operator.api.overlay import merge, placement_of
from outbox_operator.cluster.drift import build_removal
from outbox_operator.reconcile.podstate import find_problem, parse_report, view_job, view_pod
from outbox_operator.watch.store import Store
from tests.unit.operator.building import NOW, build_processor, build_report

# --- overlay ----------------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {
    "containers": [{"name": "worker", "image": "a", "env": [{"name": "A", "value": "1"}], "args": ["x"]}],
    "volumes": [{"name": "tmp", "emptyDir": {}}],
}


@pytest.mark.parametrize(
    ("overlay", "expected"),
    [
        pytest.param({}, BASE, id="nothing"),
        pytest.param({"nodeSelector": {"a": "b"}}, {**BASE, "nodeSelector": {"a": "b"}}, id="a new field"),
        pytest.param(
            {"containers": [{"name": "worker", "env": [{"name": "B", "value": "2"}]}]},
            {
                **BASE,
                "containers": [
                    {**BASE["containers"][0], "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]}
                ],
            },
            id="a variable",
        ),
        pytest.param(
            {"containers": [{"name": "side", "image": "s"}]},
            {**BASE, "containers": [*BASE["containers"], {"name": "side", "image": "s"}]},
            id="a sidecar",
        ),
        pytest.param(
            {"containers": [{"name": "worker", "args": ["y"]}]},
            {**BASE, "containers": [{**BASE["containers"][0], "args": ["y"]}]},
            id="a plain list is replaced",
        ),
        pytest.param(
            {"volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
            {**BASE, "volumes": [{"name": "tmp", "hostPath": {"path": "/x"}}]},
            id="a volume changes its kind",
        ),
        pytest.param({"volumes": None}, {"containers": BASE["containers"]}, id="null removes"),
    ],
)
def test_an_overlay_is_laid_over_by_name(overlay: dict[str, Any], expected: dict[str, Any]):
    assert merge(BASE, overlay) == expected


@pytest.mark.parametrize(
    ("overlay", "words"),
    [
        ({"metadata": None}, "metadata must be an object"),
        ({"metadata": {"labels": "team"}}, "metadata.labels must be an object"),
        ({"spec": []}, "spec must be an object"),
        ({"spec": {"containers": ["worker"]}}, "spec.containers[0] must be an object with 'name'"),
        ({"spec": {"containers": [{"image": "mine"}]}}, "spec.containers[0] must be an object with 'name'"),
        (
            {"spec": {"containers": [{"name": "worker", "env": [{"name": {}}]}]}},
            "spec.containers[0].env[0] must be an object with 'name'",
        ),
    ],
)
def test_an_overlay_that_cannot_be_laid_over_is_refused_with_its_place(overlay: dict[str, Any], words: str):
    with pytest.raises(ValidationError) as refusal:
        build_processor(worker={"podTemplate": overlay})
    assert words in str(refusal.value)


def test_jobs_take_of_an_overlay_only_where_they_run():
    overlay = {"spec": {"tolerations": [1], "containers": [2]}, "metadata": {"labels": {"a": "b"}}}
    assert placement_of(overlay) == {"metadata": {"labels": {"a": "b"}}, "spec": {"tolerations": [1]}}
    assert placement_of(None) == {}


# --- drift ------------------------------------------------------------------------------------------------------------

K_WORKER = 'k:{"name":"worker"}'
K_EXTRA = 'k:{"name":"EXTRA"}'


def live_deployment(*foreign: dict[str, Any], manager: str = "kubectl-edit") -> dict[str, Any]:
    own: dict[str, Any] = {
        "f:spec": {"f:template": {"f:spec": {"f:containers": {K_WORKER: {".": {}, "f:image": {}, "f:name": {}}}}}}
    }
    entries = [{"manager": "outbox-operator", "operation": "Apply", "fieldsV1": own}]
    entries += [{"manager": manager, "operation": "Update", "fieldsV1": fields} for fields in foreign]
    container = {"name": "worker", "image": "a", "env": [{"name": "A"}, {"name": "EXTRA", "value": "1"}]}
    return {
        "kind": "Deployment",
        "metadata": {"resourceVersion": "7", "managedFields": entries},
        "spec": {
            "replicas": 1,
            "template": {
                "metadata": {"annotations": {"kubectl.kubernetes.io/restartedAt": "now"}},
                "spec": {"containers": [container], "nodeSelector": {"disk": "ssd"}},
            },
        },
    }


def in_pod(fields: dict[str, Any]) -> dict[str, Any]:
    return {"f:spec": {"f:template": {"f:spec": fields}}}


ADDED = in_pod({"f:containers": {K_WORKER: {"f:env": {K_EXTRA: {".": {}, "f:name": {}, "f:value": {}}}}}})


def test_what_another_client_added_is_taken_out_and_nothing_else():
    patch = build_removal(live_deployment(ADDED, in_pod({"f:nodeSelector": {}})))
    assert patch[0] == {"op": "test", "path": "/metadata/resourceVersion", "value": "7"}
    assert {one["path"] for one in patch[1:]} == {
        "/spec/template/spec/containers/0/env/1",
        "/spec/template/spec/nodeSelector",
    }


def test_what_we_own_too_stays():
    assert build_removal(live_deployment(in_pod({"f:containers": {K_WORKER: {"f:image": {}}}}))) == []


def test_the_clusters_own_components_and_a_rollout_restart_may_write():
    restart: dict[str, Any] = {
        "f:spec": {"f:template": {"f:metadata": {"f:annotations": {"f:kubectl.kubernetes.io/restartedAt": {}}}}}
    }
    assert build_removal(live_deployment(restart)) == []
    assert build_removal(live_deployment(ADDED, manager="kube-controller-manager")) == []


def test_the_patch_removes_from_the_end_of_a_list():
    two = in_pod({"f:containers": {K_WORKER: {"f:env": {K_EXTRA: {".": {}}, 'k:{"name":"A"}': {".": {}}}}}})
    assert [one["path"][-1] for one in build_removal(live_deployment(two))[1:]] == ["1", "0"]


# --- pods -------------------------------------------------------------------------------------------------------------


def pod(phase: str = "Pending", waiting: dict[str, Any] | None = None, **status: Any) -> dict[str, Any]:
    containers = [{"name": "worker", "image": "i", "state": {"waiting": waiting}}] if waiting else []
    return {
        "metadata": {"name": "p", "uid": "u", "labels": {}},
        "spec": {"nodeName": "n"},
        "status": {"phase": phase, "containerStatuses": containers, **status},
    }


def init(state: dict[str, Any], **status: Any) -> dict[str, Any]:
    """A pod whose first container comes before the worker's."""
    first = {"name": "setup", "image": "i", "state": state, **status}
    return pod(waiting={"reason": "PodInitializing"}, initContainerStatuses=[first])


MOUNT = 'MountVolume.SetUp failed for volume "source-connection" : secret "db" not found'
CRASHED = {"terminated": {"exitCode": 1, "message": "out of luck"}}


@pytest.mark.parametrize(
    ("body", "notes", "reason", "words"),
    [
        pytest.param(pod("Running"), [], None, "", id="it runs"),
        pytest.param(pod(waiting={"reason": "ContainerCreating"}), [], None, "", id="it needs a moment"),
        pytest.param(
            pod(waiting={"reason": "ContainerCreating"}), [MOUNT], "ConnectionSecretInvalid", "'db'", id="no Secret"
        ),
        pytest.param(
            pod(waiting={"reason": "ContainerCreating"}),
            [MOUNT.replace("secret", "configmap")],
            "ConfigMapMissing",
            "'db'",
            id="no ConfigMap",
        ),
        pytest.param(
            pod(waiting={"reason": "ContainerCreating"}), ["volume busy"], "PodNotStarted", "volume busy", id="a volume"
        ),
        pytest.param(
            pod(waiting={"reason": "ImagePullBackOff", "message": "denied"}),
            [],
            "ImageUnavailable",
            "denied",
            id="image",
        ),
        pytest.param(
            pod(conditions=[{"type": "PodScheduled", "reason": "Unschedulable", "message": "0/1 nodes"}]),
            [],
            "Unschedulable",
            "0/1 nodes",
            id="no node",
        ),
        pytest.param(
            {
                **pod("Running"),
                "status": {
                    "phase": "Running",
                    "containerStatuses": [
                        {"name": "worker", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": CRASHED}
                    ],
                },
            },
            [],
            "Crashing",
            "the container ended with 1: out of luck",
            id="it crashes",
        ),
        pytest.param(
            init({"waiting": {"reason": "ImagePullBackOff", "message": "denied"}}),
            [],
            "ImageUnavailable",
            "denied",
            id="image of an init container",
        ),
        pytest.param(
            init({"waiting": {"reason": "CrashLoopBackOff"}}, lastState=CRASHED),
            [],
            "Crashing",
            "container 'setup' ended with 1: out of luck",
            id="an init container crashes",
        ),
        pytest.param(
            init({"waiting": {"reason": "PodInitializing"}}),
            [MOUNT],
            "ConnectionSecretInvalid",
            "'db'",
            id="no Secret, and an init container waits for it too",
        ),
        pytest.param(init({"running": {}}), [MOUNT], None, "", id="an init container works"),
    ],
)
def test_a_pods_problem_in_its_own_words(body: dict[str, Any], notes: list[str], reason: str | None, words: str):
    problem = find_problem(body, notes, NOW)
    assert (problem.reason if problem else None) == reason
    assert words in (problem.message if problem else "")


def test_a_container_that_ends_without_a_word_has_its_log_named():
    """An image that is not a worker's, a process that cannot start, too little memory."""
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    crashing = {"name": "worker", "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": ended}
    body = pod("Running", containerStatuses=[crashing])
    body["metadata"]["namespace"] = "shop"
    problem = find_problem(body, [], NOW)
    assert problem is not None
    assert problem.message == (
        "the container ended with 137: OOMKilled; its log may say why: kubectl -n shop logs p -c worker --previous"
    )


def test_a_container_that_ends_again_and_again_is_crashing_between_two_ends_too():
    """As the kubelet tells it: the first restart comes at once, each other one after a backoff."""

    def tell(minutes: int, restarts: int, state: dict[str, Any], *, ready: bool = False) -> str:
        ended = {"terminated": {"exitCode": 1, "finishedAt": (NOW - timedelta(minutes=minutes)).isoformat()}}
        last = {"lastState": ended} if restarts else {}
        status = {"name": "worker", "restartCount": restarts, "ready": ready, "state": state, **last}
        problem = find_problem(pod("Running", containerStatuses=[status]), [], NOW)
        return problem.reason if problem is not None else ""

    runs: dict[str, Any] = {"running": {}}
    ends = {"terminated": {"exitCode": 1, "finishedAt": NOW.isoformat()}}
    waits = {"waiting": {"reason": "CrashLoopBackOff"}}
    told = [tell(0, 0, runs), tell(0, 0, ends), tell(0, 1, runs), tell(0, 1, ends), tell(0, 1, waits)]
    told += [tell(1, 2, runs), tell(9, 2, runs), tell(9, 2, ends), tell(5, 2, waits), tell(5, 3, runs)]
    assert told == [""] * 4 + ["Crashing"] * 6
    assert tell(1, 2, {"waiting": {"reason": "RunContainerError"}}) == "Crashing", "beside CrashLoopBackOff, in turns"
    assert tell(1, 2, {"waiting": {"reason": "CreateContainerConfigError"}}) == "PodNotStarted", "says what is missing"
    assert tell(1, 3, runs, ready=True) == "", "it works"
    assert tell(11, 3, runs) == "", "it has run for as long as the kubelet wants to forget the ends"


def test_the_termination_message_is_read_as_a_report():
    text = build_report().model_dump_json(by_alias=True)
    body = pod("Failed")
    ended = {"name": "worker", "state": {"terminated": {"exitCode": 10, "message": text}}}
    beside = {"name": "beside", "state": {"terminated": {"exitCode": 0}}}
    body["status"]["containerStatuses"] = [beside, ended]
    view = view_pod(body, Role.CLAIM, [], NOW)
    assert (view.exit_code, view.last_words and view.last_words.pod) == (10, "orders-0")
    assert parse_report("Segmentation fault") is None
    assert parse_report('{"half":') is None


def test_the_last_words_are_those_of_the_container_that_the_pod_is_for():
    """Statuses are sorted by name, and another container may have ended while the worker runs."""
    body = pod("Running")
    first = {"name": "beside", "state": {}, "lastState": CRASHED}
    for name in ("worker", "driver"):
        body["status"]["containerStatuses"] = [first, {"name": name, "state": {"running": {}}}]
        view = view_pod(body, Role.WORKER, [], NOW)
        assert (view.exit_code, view.last_words) == (None, None)


@pytest.mark.parametrize(
    ("kind", "expected"), [("Complete", (True, True)), ("Failed", (True, False)), ("", (False, False))]
)
def test_a_job_has_ended_when_its_condition_says_so(kind: str, expected: tuple[bool, bool]):
    conditions = [{"type": kind, "status": "True"}] if kind else []
    view = view_job({"metadata": {"name": "j"}, "status": {"conditions": conditions}})
    assert (view.finished, view.succeeded) == expected


# --- store and queue --------------------------------------------------------------------------------------------------


def body(version: int, uid: str = "u", processor_id: str = "orders") -> dict[str, Any]:
    meta = {"namespace": "shop", "name": "orders", "uid": uid, "resourceVersion": str(version)}
    return {"kind": "OutboxProcessor", "metadata": meta, "spec": {"processorId": processor_id}}


def test_the_store_takes_only_what_is_newer():
    store = Store()
    assert store.put(body(2))
    assert not store.put(body(1))
    assert store.put(body(3, uid="created again"))
    assert not store.put(body(2)), "the one before it, in a listing that is older"
    store.remove(body(9))
    assert store.resource(("shop", "orders")) is not None


def test_a_listing_older_than_a_deletion_brings_nothing_back():
    store = Store()
    store.put(body(2))
    store.remove(body(4))
    assert not store.put(body(3))
    assert store.put(body(5)), "seen again: its label was taken off and put back"


def test_the_store_finds_resources_by_processor_id():
    store = Store()
    store.put(body(1))
    store.put(body(2, processor_id="other"))
    assert store.with_processor_id("orders") == []
    assert len(store.with_processor_id("other")) == 1
    store.remove(body(3))
    assert store.with_processor_id("other") == []
    assert not any(store._indexes.values()), "names come and go, and must leave nothing"
