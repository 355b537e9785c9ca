"""(i) A second resource with the same processorId, in another namespace: it handles nothing and names the owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from tests.demo.place import EXAMPLES, NAMESPACE, OTHER_NAMESPACE, PROJECTION
from tests.demo.scene import Scene

if TYPE_CHECKING:
    from tests.demo.scene import Demo

NAME = "orders-projection-copy"


def run(demo: Demo) -> None:
    """Apply it, look at what it says, take it away again."""
    scene = Scene(demo, "(i) second resource", NAME, OTHER_NAMESPACE)
    before = demo.database.claim(PROJECTION)
    resource = yaml.safe_load((EXAMPLES / "orders-projection.yaml").read_text())
    resource["metadata"] = {"name": NAME, "namespace": OTHER_NAMESPACE}
    resource["spec"]["processorId"] = PROJECTION
    scene.did(f"kubectl apply of {OTHER_NAMESPACE}/{NAME} with processorId {PROJECTION}")
    demo.cluster.apply(resource)
    scene.expect_condition("OwnershipGranted", "False", f"{NAMESPACE}/{PROJECTION}")
    scene.expect_event(f"{NAMESPACE}/{PROJECTION}")
    scene.expect_no_pods()
    scene.require("the claim is where it was", demo.database.claim(PROJECTION) == before)
    demo.cluster.kubectl("delete", "obp", NAME, "-n", OTHER_NAMESPACE, "--wait=true", "--timeout=60s")
    scene.require("deleting the duplicate left the claim alone", demo.database.claim(PROJECTION) == before)
