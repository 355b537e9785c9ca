"""Where the demo runs: which cluster, which namespaces and names, and whether the node is this very machine."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.cache import CACHE

CHECKOUT: Final = Path(__file__).resolve().parents[3]
EXAMPLES: Final = CHECKOUT / "examples"
MANIFESTS: Final = Path(__file__).resolve().parent / "manifests"
CHART: Final = CHECKOUT / "charts" / "outbox-operator"

NAMESPACE: Final = "outbox-demo"
OTHER_NAMESPACE: Final = "outbox-demo-other"
OPERATOR_NAMESPACE: Final = "outbox-system"
CLUSTER_ID: Final = "demo-cluster"
RELEASE: Final = "outbox-operator"

PROJECTION: Final = "orders-projection"
LOYALTY: Final = "orders-loyalty"
RABBITMQ: Final = "orders-to-rabbitmq"
ANALYTICS: Final = "orders-analytics"
PARCELS: Final = "orders-parcels"
SEARCH: Final = "orders-search"
PROCESSORS: Final = (PROJECTION, LOYALTY, RABBITMQ, ANALYTICS)
BESIDE: Final = {PARCELS: "parcels", SEARCH: "search"}
"""Those that come at the end, to the same messages, in other modes; each with the schema of its table."""

QUEUE: Final = "orders"
EXCHANGE: Final = "orders"


@dataclass(frozen=True, slots=True)
class Place:
    """The cluster at hand.

    Attributes:
        kubeconfig: how to reach it.
        local: the cluster that `make demo` starts: its node is this machine, so processes can be stopped and pods
            reached directly. With a cluster of the user's own neither is so.
        registry: prefix of the images.
        tag: their tag.
        work: directory for logs and passwords of this run.
        programs: where kubectl and helm were put.

    """

    kubeconfig: Path
    local: bool
    registry: str
    tag: str
    work: Path
    programs: Path

    def fresh_log_dir(self) -> Path:
        """Return an empty directory for the producers' commit logs."""
        directory = self.work / "commit-logs"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return directory


def read_place() -> Place:
    """Take the place from the environment, as run.sh left it."""
    state = Path(os.environ.get("OUTBOX_STATE", "/var/lib/outbox-operator"))
    given = os.environ.get("KUBECONFIG", "")
    local = given in ("", str(state / "kubeconfig"))
    return Place(
        kubeconfig=state / "kubeconfig" if local else Path(given),
        local=local,
        registry="localhost" if local else os.environ.get("OUTBOX_REGISTRY", ""),
        tag=os.environ.get("OUTBOX_TAG", "dev"),
        # Not where others may write: there will be passwords.
        work=state / "demo" if local else CACHE / "demo",
        programs=CACHE / "bin",
    )
