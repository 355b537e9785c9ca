"""The real Argo CD installs the operator and its processors from git; kubectl and kstatus read the same from them."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from outbox_operator.crd import UNSEEN
from tests.chart.test_argocd import CASES, health, resource_of
from tests.support.kubernetes.argocd import Application, ArgoCD, argocd, read_kstatus, wait_with_kubectl
from tests.support.kubernetes.cluster import REGISTRY, Body, Cluster, namespaces, wait
from tests.support.kubernetes.room import Resource, Room, build_processor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.kubernetes.shop import DatabaseServer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

SAMPLE_SECONDS = 0.1


@dataclass
class Samples:
    """Every state of the processors of a namespace that a reader could have met."""

    cluster: Cluster
    namespace: str
    seen: dict[tuple[str, str], Body] = field(default_factory=dict)

    @contextmanager
    def taken(self) -> Iterator[None]:
        over = threading.Event()
        thread = threading.Thread(target=self._take, args=(over,))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _take(self, over: threading.Event) -> None:
        while not over.wait(SAMPLE_SECONDS):
            for body in self.cluster.items("OutboxProcessor", self.namespace):
                self.seen.setdefault((body["metadata"]["name"], body["metadata"]["resourceVersion"]), body)


def version(namespace: str, batch_size: int) -> Body:
    """One revision of the processor `orders`; it leaves the number of replicas to an autoscaler."""
    return build_processor("orders", namespace, delivery={"pollInterval": "100ms", "batchSize": batch_size})


@dataclass(frozen=True, slots=True)
class Shop:
    """Processors from git: `orders` is there and Healthy when a test begins."""

    argo: ArgoCD
    room: Room
    application: Application
    samples: Samples

    @property
    def orders(self) -> Resource:
        return Resource(self.room.cluster, self.room.namespace, "orders")

    def commit(self, **files: Body | None) -> str:
        revision = self.argo.repository.commit(**files)
        self.application.refresh()
        return revision


READINGS = {
    "Healthy": {"Current"},
    "Suspended": {"Current"},
    "Degraded": {"Failed"},
    "Progressing": {"InProgress", "Terminating"},
}
"""What kstatus says of a resource, by the health that Argo CD shows."""


@pytest.fixture(scope="module")
def argo(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArgoCD]:
    with (
        namespaces(cluster, "argocd", prefix="argo") as (namespace,),
        argocd(cluster, namespace, tmp_path_factory.mktemp("argocd")) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def served(cluster: Cluster) -> Iterator[str]:
    with namespaces(cluster, "shop", prefix="argo") as (namespace,):
        yield namespace


@pytest.fixture(scope="module")
def chart(argo: ArgoCD, served: str) -> Iterator[Application]:
    """The operator, as the example installs it; its namespace is Argo CD's to make."""
    revision = argo.repository.commit()
    system = f"{argo.namespace}-system"
    application = argo.apply(
        "application.yaml",
        destination__namespace=system,
        source__helm__valuesObject__image={"registry": REGISTRY, "tag": "dev"},
        source__helm__valuesObject__watchNamespaces=[served],
    )
    try:
        application.until(revision, "Healthy", within=120)
        yield application
        application.delete()
        assert argo.cluster.get("CustomResourceDefinition", "", "outboxprocessors.outbox-operator.dev"), "it is kept"
    finally:
        argo.cluster.delete("Namespace", "", system)


@pytest.fixture(scope="module")
def shop(argo: ArgoCD, chart: Application, served: str, server: DatabaseServer) -> Iterator[Shop]:
    room = Room(argo.cluster, server, served, server.make())
    room.secret()
    room.prepare()
    samples = Samples(argo.cluster, served)
    with samples.taken():
        revision = argo.repository.commit(orders=version(served, 10))
        application = argo.apply("processors.yaml", destination__namespace=served)
        application.until(revision, "Healthy", within=120)
        yield Shop(argo, room, application, samples)
        application.delete()
        assert argo.cluster.items("OutboxProcessor", served) == []


def test_the_chart_is_synced_once_and_stays_so(argo: ArgoCD, chart: Application):
    """Defaulted fields, and Secrets that the operator fills, are no differences."""
    deployment = argo.cluster.items("Deployment", f"{argo.namespace}-system")[0]
    assert deployment["status"]["readyReplicas"] == deployment["spec"]["replicas"] == 2
    keys = argo.cluster.items("Secret", f"{argo.namespace}-system")
    assert all(secret["data"] for secret in keys), "the operator has filled them"
    chart.assert_unhealed()
    assert chart.syncs() == 1


def test_a_processor_is_healthy_when_it_is_ready(shop: Shop):
    shop.room.shop.produce(3)
    wait("messages are handled", lambda: len(shop.room.handled()) == 3, within=30)
    wait_with_kubectl(shop.room.namespace, "orders", "Ready", 30)
    assert shop.application.health_of("OutboxProcessor", "orders") == "Healthy"
    assert read_kstatus([shop.orders.read()]) == ["Current"]


def test_what_no_operator_has_looked_at_is_in_progress(argo: ArgoCD):
    """Without a status kstatus would call it done, and `helm install --wait` would end before anything runs."""
    argo.cluster.create(build_processor("unseen", argo.namespace))
    body = argo.cluster.need("OutboxProcessor", argo.namespace, "unseen")
    assert (read_kstatus([body]), health(body)["status"]) == (["InProgress"], "Progressing")


def test_replicas_are_an_autoscalers_and_a_new_revision_leaves_them(shop: Shop):
    path = shop.room.cluster.path("OutboxProcessor", shop.room.namespace, "orders")
    shop.room.cluster.call("PATCH", f"{path}/scale", {"spec": {"replicas": 2}}, "application/merge-patch+json")
    shop.application.assert_unhealed()
    syncs = shop.application.syncs()
    revision = shop.commit(orders=version(shop.room.namespace, 20))
    shop.application.until(revision, "Healthy", within=120)
    spec = shop.orders.read()["spec"]
    assert (spec["delivery"]["batchSize"], spec["worker"]["replicas"]) == (20, 2)
    assert shop.application.syncs() == syncs + 1
    shop.application.assert_unhealed()


def test_a_duplicate_degrades_nothing_is_fought_over_and_it_is_pruned(shop: Shop):
    before = shop.orders.read()
    copy = build_processor("copy", shop.room.namespace, processorId="orders", worker={"replicas": 1})
    revision = shop.commit(copy=copy)
    shop.application.until(revision, "Degraded", within=90)
    assert shop.application.health_of("OutboxProcessor", "copy") == "Degraded"
    assert shop.application.health_of("OutboxProcessor", "orders") == "Healthy"
    wait_with_kubectl(shop.room.namespace, "copy", "Stalled", 5)
    assert read_kstatus([shop.orders.read(), Resource(shop.room.cluster, shop.room.namespace, "copy").read()]) == [
        "Current",
        "Failed",
    ]
    shop.application.assert_unhealed()
    assert shop.orders.read()["metadata"]["generation"] == before["metadata"]["generation"]
    shop.application.until(shop.commit(copy=None), "Healthy", within=60)
    assert [body["metadata"]["name"] for body in shop.room.cluster.items("OutboxProcessor", shop.room.namespace)] == [
        "orders"
    ]


@pytest.mark.nightly
def test_it_rolls_back_to_a_former_revision(shop: Shop):
    former = shop.application.status["sync"]["revision"]
    newest = shop.commit(orders=version(shop.room.namespace, 30))
    shop.application.until(newest, "Healthy", within=120)
    automated = shop.application.read()["spec"]["syncPolicy"]["automated"]
    shop.application.patch(spec={"syncPolicy": {"automated": None}})
    shop.application.roll_back(former)
    wait("the former spec", lambda: shop.orders.read()["spec"]["delivery"]["batchSize"] != 30, within=60)
    # Git is ahead, and the rollback is said to differ from it until it is reverted there.
    shop.application.until(newest, "Healthy", "OutOfSync", within=120)
    wait_with_kubectl(shop.room.namespace, "orders", "Ready", 60)
    shop.application.patch(spec={"syncPolicy": {"automated": automated}})
    shop.application.until(newest, "Healthy", within=120)
    assert shop.orders.read()["spec"]["delivery"]["batchSize"] == 30, "what Git has is put back"


def test_every_state_so_far_was_read_alike(shop: Shop):
    """Argo CD by our script, Helm 4 and Flux by kstatus, kubectl by Ready."""
    states = list(shop.samples.seen.values())
    kstatus = read_kstatus(states)
    for body, read in zip(states, kstatus, strict=True):
        conditions = {one["type"]: one for one in body["status"].get("conditions") or ()}
        ready = conditions.get("Ready", {})
        current = ready.get("observedGeneration") == body["metadata"]["generation"]
        assert read in READINGS[health(body)["status"]], body
        assert (read == "Current") == (ready.get("status") == "True" and current), body
    assert {"InProgress", "Current", "Failed"} <= set(kstatus)
    print(f"{len(states)} states: { ({read: kstatus.count(read) for read in set(kstatus)}) }")


def test_helm_and_flux_read_the_same():
    """Of all that the API server holds: the CRD's own status, and what the operator writes over it in one go."""
    cases = [(resource_of(case["inputPath"]), case["healthStatus"]["status"]) for case in CASES]
    real = [(body, status) for body, status in cases if _is_whole(body.get("status", {}))]
    assert {status for _, status in real} == set(READINGS)
    for (body, status), read in zip(real, read_kstatus([body for body, _ in real]), strict=True):
        assert read in READINGS[status], body


def _is_whole(status: Body) -> bool:
    ready = any(condition["type"] == "Ready" for condition in status.get("conditions", ()))
    return status == UNSEEN or (ready and "observedGeneration" in status)
