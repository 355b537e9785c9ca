"""An upgrade of the operator: one that brings another worker image comes to some processors at a time, until one fails.

One that brings none replaces no pod. Its former version is this one with another rendering, or the commit that
OUTBOX_FORMER names: a clone need not have the history.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.support.kubernetes.cluster import REGISTRY, ROOT, STATE, kubeconfig, wait
from tests.support.kubernetes.operator import OperatorProcess, installed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Body, Cluster
    from tests.support.kubernetes.room import Resource, Room

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(280)]

IMAGE = f"{REGISTRY}/outbox-worker:dev"
MISSING = f"{REGISTRY}/outbox-worker:not-there"
RECONCILES = "outbox_operator_reconcile_seconds_count"


@pytest.fixture
def next_image() -> Iterator[str]:
    """The workers' image under another name: an image that the pods do not have yet."""
    if kubeconfig() != STATE / "kubeconfig":
        pytest.skip("it gives an image another name on the local node")
    run = os.environ.get("OUTBOX_RUN") or "/run/outbox-operator"
    images = ["ctr", "-a", f"{run}/containerd.sock", "-n", "k8s.io", "images"]
    name = f"{REGISTRY}/outbox-worker:next"
    subprocess.run([*images, "tag", "--force", IMAGE, name], check=True, capture_output=True)
    yield name
    subprocess.run([*images, "rm", name], check=True, capture_output=True)


@pytest.fixture
def operator(cluster: Cluster, room: Room, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator with a budget of one processor."""
    budget = {"rollout": {"maxConcurrent": 1}}
    with (
        installed(cluster, room.namespace, [room.namespace], pods=0, **budget) as release,
        OperatorProcess(release, tmp_path) as process,
    ):
        yield process


def upgrade(operator: OperatorProcess, image: str) -> None:
    restart(operator, OUTBOX_WORKER_IMAGE=image)


def restart(operator: OperatorProcess, **told: str) -> None:
    operator.stop()
    operator.told.update(told)
    operator.start()


SOURCES = ("operator/src", "worker/src")
ENVIRONMENT = '_field("POD_IP", "status.podIP"),'


def copy_former(folder: Path) -> str:
    """Copy another version's sources; gives the path that Python imports them from."""
    commit = os.environ.get("OUTBOX_FORMER")
    if commit:
        archive = subprocess.run(["git", "archive", commit, *SOURCES], cwd=ROOT, check=True, capture_output=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
    else:
        for source in SOURCES:
            shutil.copytree(ROOT / source, folder / source)
        pods = folder / "operator/src/outbox_operator/rendering/pods.py"
        text = pods.read_text()
        assert text.count(ENVIRONMENT) == 1
        pods.write_text(text.replace(ENVIRONMENT, f'{ENVIRONMENT} {{"name": "FORMER", "value": "yes"}},'))
    return os.pathsep.join(str(folder / source) for source in SOURCES)


def pod_of(resource: Resource) -> Body:
    (pod,) = resource.pods()
    return pod


def image_of(pod: Body) -> str:
    found: str = pod["spec"]["containers"][0]["image"]
    return found


def is_done(resource: Resource, image: str) -> bool:
    pods = resource.pods()
    settled = [resource.condition(kind).get("status") for kind in ("Ready", "Reconciling")] == ["True", "False"]
    return settled and [image_of(pod) for pod in pods] == [image]


def became_ready(pod: Body) -> str:
    (time,) = [each["lastTransitionTime"] for each in pod["status"]["conditions"] if each["type"] == "Ready"]
    return str(time)


def test_an_image_that_does_not_start_stops_at_the_first_and_a_mended_one_comes_to_one_after_the_other(
    room: Room, operator: OperatorProcess, next_image: str
):
    resources = [room.processor(f"orders{number}") for number in range(4)]
    for each in resources:
        each.until_ready()
    upgrade(operator, MISSING)

    def failed() -> list[Resource]:
        return [each for each in resources if each.condition("Ready").get("reason") == "ImageUnavailable"]

    (first,) = wait("one fails", failed, within=60)
    others = [each for each in resources if each != first]
    stuck = f"{room.namespace}/{first.name} is not Ready again (ImageUnavailable)"

    def told(waiting: list[Resource]) -> bool:
        said = [(each.condition("Ready"), each.condition("Reconciling")) for each in waiting]
        return all(
            (ready.get("status"), moving.get("reason")) == ("True", "WaitingForRollout") and stuck in moving["message"]
            for ready, moving in said
        )

    wait("the others work on and say why they wait", lambda: told(others), within=60)
    # Another process finds on the cluster who has begun.
    upgrade(operator, MISSING)
    wait("it has decided about all", lambda: operator.metrics().get(RECONCILES, 0) >= len(resources), within=60)
    assert told(others)
    assert [image_of(pod_of(each)) for each in others] == [IMAGE] * 3

    changed, *waiting = others
    changed.spec(worker={"image": next_image})
    changed.until("the user's change does not wait", lambda: is_done(changed, next_image), within=60)
    assert told(waiting)

    upgrade(operator, next_image)
    room.shop.produce(5)
    first.until("all have the mended image", lambda: all(is_done(each, next_image) for each in resources), within=150)
    staged = [pod_of(each) for each in (first, *waiting)]
    pods = sorted(staged, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    for before, after in pairwise(pods):
        assert after["metadata"]["creationTimestamp"] >= became_ready(before), "two were replaced at a time"
    wait("each has handled all", lambda: len(room.handled()) >= 5 * len(resources), within=30)
    assert len(room.handled()) == 5 * len(resources), "and nothing twice"


def lives_of(resources: list[Resource]) -> dict[str, int]:
    """The pods by uid, with how often their processes were started again."""
    pods = [pod for each in resources for pod in each.pods()]
    return {
        pod["metadata"]["uid"]: sum(each["restartCount"] for each in pod["status"].get("containerStatuses") or ())
        for pod in pods
    }


def test_an_operator_of_another_version_replaces_no_pod_while_image_and_spec_are_the_same(
    room: Room, operator: OperatorProcess, tmp_path: Path
):
    restart(operator, PYTHONPATH=copy_former(tmp_path / "former"))
    divided = {"mode": "Partitioned", "partitions": {"count": 2}, "pollInterval": "100ms"}
    resources = [room.processor("orders"), room.processor("divided", delivery=divided, worker={"replicas": 2})]
    for each in resources:
        each.until_ready()
    wait("three pods are ready", lambda: sum(each.status.get("readyReplicas", 0) for each in resources) == 3, within=60)
    before = lives_of(resources)
    assert len(before) == 3

    restart(operator, PYTHONPATH="")
    wait("it has decided about all", lambda: operator.metrics().get(RECONCILES, 0) >= len(resources), within=60)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        assert lives_of(resources) == before, room.cluster.explain(room.namespace)
        time.sleep(0.5)
    room.shop.produce(5)
    wait("each has handled all", lambda: len(room.handled()) >= 10, within=30)
    assert len(room.handled()) == 10, "and nothing twice"

    orders, _ = resources
    orders.spec(delivery={"batchSize": 7, "pollInterval": "100ms"})
    orders.until("a change of the spec brings another pod", lambda: not lives_of([orders]).keys() & before.keys())
    orders.until_ready()
    assert lives_of(resources[1:]).items() <= before.items()
