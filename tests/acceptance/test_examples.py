"""Every example is taken by the API server as it stands, by a server-side dry run; the job that prunes is run."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.acceptance.scenarios import until_handled
from tests.chart.chart import tool
from tests.support.kubernetes.cluster import REGISTRY, ROOT, kubeconfig, namespaces

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.acceptance.conftest import Rooms
    from tests.support.kubernetes.cluster import Cluster
    from tests.support.kubernetes.room import Room

pytestmark = pytest.mark.cluster

KINDS = ("kind: OutboxProcessor", "kind: CronJob")
EXAMPLES = sorted(
    path for path in (ROOT / "examples").rglob("*.yaml") if any(kind in path.read_text() for kind in KINDS)
)
OURS = [path for path in EXAMPLES if "argocd" not in path.parts and path.name != "keda.yaml"]
"""The kinds of Argo CD and KEDA are not installed here."""


@pytest.fixture(scope="module")
def namespace(cluster: Cluster) -> Iterator[str]:
    with namespaces(cluster, "examples") as (name,):
        yield name


@pytest.mark.parametrize("path", OURS, ids=lambda path: str(path.relative_to(ROOT / "examples")))
def test_the_api_server_takes_an_example_without_a_word(namespace: str, path: Path) -> None:
    command = [str(tool("kubectl")), "--kubeconfig", str(kubeconfig()), "apply", "--server-side", "--dry-run=server"]
    done = subprocess.run([*command, "-n", namespace, "-f", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "serverside-applied (server dry run)" in done.stdout
    assert done.stderr == "", "no warning"


def test_the_job_of_the_example_for_pruning_deletes_what_is_handled(rooms: Rooms) -> None:
    example = yaml.safe_load((ROOT / "examples/orders-pruning.yaml").read_text())
    spec = example["spec"]["jobTemplate"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    with rooms.room() as room:
        orders = room.processor("orders")
        orders.until_ready()
        room.shop.produce(3)
        until_handled(room, orders, 3)
        room.shop.query("UPDATE outbox.messages SET scheduled = now() - interval '8 days' WHERE position < 3")
        room.secret("orders-db")
        container["image"] = f"{REGISTRY}/outbox-worker:dev"
        meta = {"name": "pruning", "namespace": room.namespace}
        room.cluster.create({"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec})
        left = "SELECT position FROM outbox.messages"
        orders.until("two are deleted", lambda: room.shop.query(left) == [(3,)], 60)
        job = orders.until("the job is done", lambda: _find_end(room), 60)
        assert job == "Complete", room.cluster.explain(room.namespace)


def _find_end(room: Room) -> str:
    status = room.cluster.need("Job", room.namespace, "pruning").get("status", {})
    ends = [each["type"] for each in status.get("conditions", ()) if each["status"] == "True"]
    return next((end for end in ends if end in ("Complete", "Failed")), "")
