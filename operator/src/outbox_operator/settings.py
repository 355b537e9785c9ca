"""How one operator process is set up: from the environment, which the chart writes; flags win over it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox_core.plain import port_number
from outbox_operator.api.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Images:
    """What the installation gives to resources: default images, the drivers' role, keys, budgets, uid, runbook."""

    worker: str = "localhost/outbox-worker:dev"
    spark: str = "localhost/outbox-spark:dev"
    driver_role: str = "outbox-operator:spark-driver"
    keys: Keys = field(default_factory=Keys)
    budgets: bool = True
    """Whether workers of several replicas get a PodDisruptionBudget."""
    user: int | None = 65532
    """Uid, gid and fsGroup of all pods; None: the cluster assigns them."""
    runbook: str = "docs/runbook.md"
    """Where the sections are that messages of conditions link to."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many processors an upgrade of the operator may replace the pods of at a time: a number, or a percentage."""

    number: int = 10
    percent: bool = True

    def of(self, processors: int) -> int:
        """Say how many that are; a percentage rounded down, and at least one."""
        return max(1, processors * self.number // 100) if self.percent else self.number


def read_budget(text: str) -> Budget:
    """Read `10%` or `3`; 0 is none.

    Raises:
        argparse.ArgumentTypeError: it is neither.

    """
    found = re.fullmatch(r"([0-9]{1,6})(%?)", text.strip())
    if found is None or (found[2] and not 1 <= int(found[1]) <= 100):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of processors, such as 3, nor 1% to 100%")
    return Budget(int(found[1]), percent=bool(found[2]))


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything an operator process is told from outside.

    Attributes:
        cluster_id: name of this cluster in claims; empty: the uid of the namespace kube-system.
        namespaces: namespaces to serve; empty: all.
        lease_namespace: where the Lease for leader election is, and the installation's Secrets.
        key_secret: name of the Secret with the installation's key.
        metrics_secret: name of the Secret with the token that reads workers' metrics.
        identity: this process among its replicas.
        port: of /livez, /readyz and /metrics.
        check_seconds: between two looks at a kind for changes that its watch missed.
        unrestricted: a podTemplate may ask for anything.
        budget: how many processors an upgrade of the operator may replace the pods of at a time.

    """

    cluster_id: str
    namespaces: tuple[str, ...]
    images: Images
    lease_namespace: str
    lease_name: str
    key_secret: str
    metrics_secret: str
    identity: str
    port: int
    log_level: str
    unrestricted: bool = False
    budget: Budget = Budget()
    check_seconds: float = 300.0


def _build_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """Name the flags; the environment says what one that is not given has."""
    env = environment.get
    parser = argparse.ArgumentParser(prog="outbox-operator", description="Runs OutboxProcessor resources.")
    parser.add_argument(
        "--namespace",
        action="append",
        help="serve this namespace; repeatable; none: all (OUTBOX_WATCH_NAMESPACES, with commas)",
    )
    parser.add_argument("--cluster-id", default=env("OUTBOX_CLUSTER_ID", ""), help="this cluster's name in claims")
    parser.add_argument("--worker-image", default=env("OUTBOX_WORKER_IMAGE", Images.worker))
    parser.add_argument("--spark-image", default=env("OUTBOX_SPARK_IMAGE", Images.spark))
    parser.add_argument("--spark-driver-role", default=env("OUTBOX_SPARK_DRIVER_ROLE", Images.driver_role))
    parser.add_argument(
        "--no-worker-budgets",
        action="store_true",
        default=env("OUTBOX_WORKER_BUDGETS", "true") == "false",
        help="make no PodDisruptionBudgets: of two about one pod Kubernetes evicts it for neither",
    )
    parser.add_argument(
        "--run-as-user",
        type=lambda text: int(text) if text else None,
        default=env("OUTBOX_RUN_AS_USER", str(Images.user)),
        help="uid, gid and fsGroup of the pods of processors; empty: none is set, for OpenShift assigns them",
    )
    parser.add_argument("--lease-name", default=env("OUTBOX_LEASE_NAME", "outbox-operator"))
    parser.add_argument("--key-secret", default=env("OUTBOX_KEY_SECRET", "outbox-operator-key"))
    parser.add_argument("--metrics-secret", default=env("OUTBOX_METRICS_SECRET", "outbox-operator-metrics-token"))
    parser.add_argument("--lease-namespace", default=env("POD_NAMESPACE", "default"))
    parser.add_argument("--identity", default=env("POD_NAME", env("HOSTNAME", "outbox-operator")))
    parser.add_argument(
        "--runbook-url",
        default=env("OUTBOX_RUNBOOK_URL", Images.runbook),
        help="where docs/runbook.md is published: messages of conditions link to its sections",
    )
    parser.add_argument("--port", type=port_number, default=env("OUTBOX_PORT", "8081"))
    parser.add_argument(
        "--check-seconds",
        type=float,
        default=env("OUTBOX_CHECK_SECONDS", "300"),
        help="seconds between two looks at a kind for changes that its watch missed",
    )
    parser.add_argument("--log-level", default=env("OUTBOX_LOG_LEVEL", "INFO"))
    parser.add_argument(
        "--unrestricted-pod-templates",
        action="store_true",
        default=env("OUTBOX_UNRESTRICTED_POD_TEMPLATES", "false") == "true",
        help="let a podTemplate ask for anything: who may create a resource may then be root on a node",
    )
    parser.add_argument(
        "--rollout-max-concurrent",
        type=read_budget,
        default=env("OUTBOX_ROLLOUT_MAX_CONCURRENT", "10%"),
        help="replace the pods of so many processors at a time when the operator's version changed: 3, or 10%%",
    )
    return parser


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read flags and environment."""
    flags = _build_parser(environment).parse_args(arguments)
    named = environment.get("OUTBOX_WATCH_NAMESPACES", "").split(",")
    watched = flags.namespace or [name for name in named if name.strip()]
    return Settings(
        cluster_id=flags.cluster_id,
        namespaces=tuple(name.strip() for name in watched),
        images=Images(
            worker=flags.worker_image,
            spark=flags.spark_image,
            driver_role=flags.spark_driver_role,
            budgets=not flags.no_worker_budgets,
            user=flags.run_as_user,
            runbook=flags.runbook_url,
        ),
        lease_namespace=flags.lease_namespace,
        lease_name=flags.lease_name,
        key_secret=flags.key_secret,
        metrics_secret=flags.metrics_secret,
        identity=flags.identity,
        port=flags.port,
        log_level=flags.log_level.upper(),
        unrestricted=flags.unrestricted_pod_templates,
        budget=flags.rollout_max_concurrent,
        check_seconds=flags.check_seconds,
    )
