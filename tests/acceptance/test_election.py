"""The Lease is renewed however busy the process is: on the real API server."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from outbox_operator.cluster.election import LEASE_SECONDS, PERIOD, Election
from tests.support.kubernetes.cluster import Cluster, kubeconfig, namespaces


async def test_a_process_that_does_nothing_else_for_longer_than_the_lease_lasts_keeps_it(
    cluster: Cluster, monkeypatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig()))
    lost: list[float] = []
    with namespaces(cluster, "election") as (namespace,):
        one = Election(namespace, "operator", "one", lost=lambda: lost.append(time.monotonic()))
        await one.acquire()
        assert one.leader.active
        time.sleep(LEASE_SECONDS + 2)  # noqa: ASYNC251 - this very loop is busy
        spec = cluster.need("Lease", namespace, "operator")["spec"]
        age = (datetime.now(UTC) - datetime.fromisoformat(spec["renewTime"])).total_seconds()
        assert (spec["holderIdentity"], lost) == ("one", [])
        assert age < 2 * PERIOD
        await one.end()
        assert cluster.need("Lease", namespace, "operator")["spec"]["holderIdentity"] == ""
        assert not one.leader.active
        two = Election(namespace, "operator", "two")
        await two.acquire()
        await two.end()
