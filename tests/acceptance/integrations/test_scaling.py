"""A HorizontalPodAutoscaler of the cluster's own controller, on the scale subresource. tests/keda has KEDA by lag."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from tests.acceptance.scenarios.modes import COMPETING
from tests.support.kubernetes.cluster import ROOT

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.cluster import Body, Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

HPAS = "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers"


def test_an_autoscaler_finds_the_processor_and_scales_it(cluster: Cluster, rooms: Rooms) -> None:
    """Nothing serves metrics here, and its bounds need none: the example's target is found, counted and scaled."""
    body: Body = yaml.safe_load((ROOT / "examples" / "scaling" / "hpa.yaml").read_text())
    with rooms.room() as room:
        path = HPAS.format(room.namespace)
        processor = room.processor("orders-shared", delivery=COMPETING)
        processor.until_ready()
        cluster.call("POST", path, {**body, "spec": {**body["spec"], "minReplicas": 2}})
        try:

            def hpa() -> Body:
                found: Body = cluster.call("GET", f"{path}/orders-shared").get("status", {})
                return found

            processor.until("two replicas are asked for", lambda: processor.read()["spec"]["worker"]["replicas"] == 2)
            processor.until("two pods are ready", lambda: processor.status.get("readyReplicas") == 2)
            processor.until("the autoscaler counts them", lambda: hpa().get("currentReplicas") == 2)
            able = next(each for each in hpa()["conditions"] if each["type"] == "AbleToScale")
            assert able["status"] == "True", able
        finally:
            cluster.call("DELETE", f"{path}/orders-shared")
