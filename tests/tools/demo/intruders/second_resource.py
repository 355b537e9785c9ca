"""A second resource with the same processorId, in another namespace: it handles nothing and names the owner.

It asks for the publisher's id with another target, the read model's statement: anything that it handled would stand in
the read model twice, and the ledger would find it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import yaml

from tests.tools.demo.place import EXAMPLES, NAMESPACE, OTHER_NAMESPACE, RABBITMQ
from tests.tools.demo.scene import Scene

if TYPE_CHECKING:
    from tests.tools.demo.scene import Demo

NAME = "orders-copy"


def run(demo: Demo) -> None:
    """Apply it, look at what it says, take it away again."""
    scene = Scene(demo, "second resource", NAME, OTHER_NAMESPACE)
    before = demo.database.claim(RABBITMQ)
    resource = yaml.safe_load((EXAMPLES / "orders-projection.yaml").read_text())
    resource["metadata"] = {"name": NAME, "namespace": OTHER_NAMESPACE}
    resource["spec"]["processorId"] = RABBITMQ
    scene.did(f"kubectl apply of {OTHER_NAMESPACE}/{NAME} with processorId {RABBITMQ}")
    demo.cluster.apply(resource)
    scene.mark()
    scene.expect_condition("OwnershipGranted", "False", f"{NAMESPACE}/{RABBITMQ}")
    scene.expect_event(f"{NAMESPACE}/{RABBITMQ}")
    scene.expect_no_pods()
    scene.require("the claim is where it was", demo.database.claim(RABBITMQ) == before)
    demo.cluster.kubectl("delete", "obp", NAME, "-n", OTHER_NAMESPACE, "--wait=true", "--timeout=60s")
    scene.require("deleting the duplicate left the claim alone", demo.database.claim(RABBITMQ) == before)
