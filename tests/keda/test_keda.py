"""examples/scaling/keda.yaml, run: a real KEDA scales a processor by the lag that a real Prometheus scraped.

Not a part of `make test`, because KEDA takes ten minutes to build. By hand, on the cluster that is up:
    tests/tools/cluster/setup.sh keda && tests/passes.sh tests/keda
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.acceptance.integrations.test_monitoring import render_monitoring, write_token
from tests.chart.chart import the
from tests.keda.server import keda, kubectl
from tests.support.kubernetes.cluster import ROOT, wait
from tests.support.kubernetes.operator import installed
from tests.support.kubernetes.prometheus import Prometheus
from tests.support.kubernetes.room import Resource

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.kubernetes.cluster import Body, Cluster
    from tests.support.kubernetes.room import Room

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(280)]

NAME = "orders-shared"
WAITING = 2900
"""Messages: three replicas at one for each thousand."""
EXAMPLES = ROOT / "examples" / "scaling"


def scaled_object(namespace: str, prometheus: Prometheus) -> Body:
    """The example, with this test's Prometheus and namespace, and without its patience."""
    body: Body = yaml.safe_load((EXAMPLES / "keda.yaml").read_text())
    body["metadata"]["namespace"] = namespace
    spec = body["spec"]
    spec["pollingInterval"] = 2
    spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] = 0
    (trigger,) = spec["triggers"]
    trigger["metadata"]["serverAddress"] = f"http://127.0.0.1:{prometheus.port}"
    trigger["metadata"]["query"] = trigger["metadata"]["query"].replace('"shop"', f'"{namespace}"')
    return body


def test_keda_scales_a_processor_by_its_lag(cluster: Cluster, room: Room, tmp_path: Path) -> None:
    manifests = render_monitoring(room.namespace)
    rules = the(manifests, "PrometheusRule")["spec"]
    body = yaml.safe_load((EXAMPLES / "processor.yaml").read_text())
    body["metadata"]["namespace"] = room.namespace
    body["spec"]["source"]["connection"]["secretRef"]["name"] = "db"
    body["spec"]["delivery"]["rateLimit"] = {"messagesPerSecond": 1}
    room.shop.query("CREATE SCHEMA parcels")
    room.shop.query(
        "CREATE TABLE parcels.handled_orders (message_id text, order_key text, order_sequence int, cents bigint)"
    )
    with installed(cluster, room.namespace, [room.namespace]):
        cluster.create(body)
        orders = Resource(cluster, room.namespace, NAME)
        orders.until_ready()
        pods = the(manifests, "PodMonitor")
        with (
            Prometheus(cluster, tmp_path, [pods], write_token(cluster, pods, tmp_path), rules) as prometheus,
            keda(cluster, room.namespace, tmp_path),
        ):
            room.shop.query(
                "INSERT INTO outbox.messages (message_id, message_type, data) SELECT 'm-' || n, 'OrderPlaced', '{}' "
                "FROM generate_series(1, %s) n",
                WAITING,
            )
            asked = tmp_path / "scaled-object.json"
            asked.write_text(json.dumps(scaled_object(room.namespace, prometheus)))
            kubectl("apply", "-f", str(asked))

            def explain() -> str:
                objects = kubectl("-n", room.namespace, "get", "scaledobject,hpa", "-o", "yaml")
                return objects + (tmp_path / "keda-operator.log").read_text()[-2000:]

            def replicas() -> int:
                return int(orders.read()["spec"]["worker"]["replicas"])

            wait("three replicas are asked for", lambda: replicas() == 3, within=90, explain=explain)
            orders.until("three consumers are ready", lambda: orders.status.get("readyReplicas") == 3)

            orders.spec(delivery={"rateLimit": None})
            wait("one replica is left", lambda: replicas() == 1, within=90, explain=explain)
            kubectl("delete", "-f", str(asked))
            assert room.shop.query("SELECT count(*), count(DISTINCT message_id) FROM parcels.handled_orders") == [
                (WAITING, WAITING)
            ]
