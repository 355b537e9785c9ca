"""An operator with nothing to do calls nothing but its Lease, however many resources there are, and writes nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from outbox_operator.reconcile.reports import FIGURES_EVERY
from tests.support.kubernetes.api_proxy import ApiProxy
from tests.support.kubernetes.cluster import namespaces, wait
from tests.support.kubernetes.operator import OperatorProcess, installed
from tests.support.kubernetes.room import Resource, build_processor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kubernetes.cluster import Cluster
    from tests.support.kubernetes.operator import Installed
    from tests.support.kubernetes.room import Room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

WINDOW = 15.0
"""Seconds in which calls are counted; each kind is compared with its listing once in 300 s, ten kinds in turns."""
NO_NODE = {"podTemplate": {"spec": {"nodeSelector": {"node": "of-nobody"}}}}
MORE = 12


def calls_in(proxy: ApiProxy, seconds: float) -> dict[str, int]:
    """Calls by verb and kind, without those for the Lease and those that are the same for any number of resources."""
    proxy.calls.clear()
    time.sleep(seconds)
    return {f"{verb} {kind}": count for (verb, kind), count in proxy.calls.items() if kind != "leases"}


def until_silent(proxy: ApiProxy) -> None:
    wait("nothing is written or read", lambda: not calls_in(proxy, 3), within=60)


def rests(resource: Resource) -> bool:
    """Nothing of it is written for longer than figures wait."""
    before = resource.read()
    time.sleep(FIGURES_EVERY + 2)
    return resource.read() == before


@pytest.fixture
def bare(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[str, ApiProxy, OperatorProcess]]:
    """A namespace without a database, the proxy, and the operator behind it."""
    with (
        namespaces(cluster, "system", "idle") as (system, served),
        installed(cluster, system, [served], pods=0) as release,
        ApiProxy(cluster) as proxy,
        OperatorProcess(release, tmp_path, server=proxy.url) as operator,
    ):
        yield served, proxy, operator


def test_an_idle_operator_calls_as_little_with_many_resources_as_with_one_and_a_restart_writes_nothing(
    cluster: Cluster, bare: tuple[str, ApiProxy, OperatorProcess]
):
    namespace, proxy, operator = bare

    def make(name: str, **spec: Any) -> Resource:
        cluster.create(build_processor(name, namespace, **spec))
        return Resource(cluster, namespace, name)

    make("one", suspend=True).until_ready("Suspended")
    until_silent(proxy)
    with_one = calls_in(proxy, WINDOW)

    for number in range(MORE):
        make(f"suspended-{number}", suspend=True)
    for resource in [make(f"waiting-{number}", worker=NO_NODE) for number in range(3)]:
        resource.until_condition("Ready", "False", "Unschedulable")
    until_silent(proxy)
    with_many = calls_in(proxy, WINDOW)
    # A look at one kind, or a watch that is continued, may fall into either: one call for a kind.
    assert max((with_one | with_many).values(), default=0) <= 1, (with_one, with_many)
    assert not [call for call in with_many if not call.startswith(("list", "watch"))], with_many

    operator.stop()
    proxy.written.clear()
    operator.start()
    decided = "outbox_operator_reconcile_seconds_count"
    wait("all are decided again", lambda: operator.metrics().get(decided, 0) >= MORE + 4, within=60)
    until_silent(proxy)
    written = {f"{verb} {kind}" for verb, kind in proxy.written if kind != "leases"}
    assert written == set(), "the cluster has it all"
    assert proxy.refused == [], "calls that the chart's roles do not allow"

    make("last", suspend=True).until_ready("Suspended")
    place = namespace, "last-worker"
    wait("its Deployment", lambda: cluster.get("Deployment", *place), within=10)
    cluster.patch("Deployment", *place, {"spec": {"replicas": 3}})
    wait("it is put back", lambda: cluster.need("Deployment", *place)["spec"]["replicas"] == 0, within=10)
    cluster.delete("ConfigMap", namespace, "last-processor")
    wait("it is made again", lambda: cluster.get("ConfigMap", namespace, "last-processor"), within=10)


@pytest.mark.nightly
def test_the_status_of_an_idle_processor_is_not_written_because_others_use_the_database(
    room: Room, release: Installed, tmp_path: Path
):
    with OperatorProcess(release, tmp_path):
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(3)
        orders.until("all are handled", lambda: len(room.handled()) == 3)
        orders.until("its lag is known", lambda: orders.status.get("lag", {}).get("messages") == 0)
        wait("its last figures are written", lambda: rests(orders), within=90)
        before = orders.read()
        room.shop.query("CREATE TABLE others (id int)")
        deadline = time.monotonic() + 25
        while time.monotonic() < deadline:
            room.shop.query("INSERT INTO others VALUES (1)")
            time.sleep(0.5)
        after = orders.read()
        assert after["status"] == before["status"]
        assert after["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"]
