"""How one operator process is set up: from the environment, which the chart writes; flags win over it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from outbox_core.plain import port_number
from outbox_operator.api.keys import Keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


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
    """Everything an operator process is told from outside; the flags' help says more."""

    cluster_id: str
    """Empty: the uid of the namespace kube-system."""
    namespaces: tuple[str, ...]
    """Those to serve; empty: all."""
    images: Images
    lease_namespace: str
    """Where the Lease for leader election is, and the installation's Secrets."""
    lease_name: str
    key_secret: str
    """Name of the Secret with the installation's key."""
    metrics_secret: str
    """Name of the Secret with the token that reads workers' metrics."""
    identity: str
    """This process among its replicas."""
    port: int
    """Of /livez, /readyz and /metrics."""
    log_level: str
    unrestricted: bool
    budget: Budget
    check_seconds: float


def _build_parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    """Name the flag of each field of `Settings` and `Images`; the environment says what one that is not given has."""
    env = environment.get
    parser = argparse.ArgumentParser(prog="outbox-operator", description="Runs OutboxProcessor resources.")
    add = parser.add_argument
    add(
        "--namespace",
        dest="namespaces",
        action="append",
        help="serve this namespace; repeatable; none: all (OUTBOX_WATCH_NAMESPACES, with commas)",
    )
    add("--cluster-id", default=env("OUTBOX_CLUSTER_ID", ""), help="this cluster's name in claims")
    _add_images(add, env)
    add("--lease-name", default=env("OUTBOX_LEASE_NAME", "outbox-operator"))
    add("--key-secret", default=env("OUTBOX_KEY_SECRET", "outbox-operator-key"))
    add("--metrics-secret", default=env("OUTBOX_METRICS_SECRET", "outbox-operator-metrics-token"))
    add("--lease-namespace", default=env("POD_NAMESPACE", "default"))
    add("--identity", default=env("POD_NAME", env("HOSTNAME", "outbox-operator")))
    add("--port", type=port_number, default=env("OUTBOX_PORT", "8081"))
    add(
        "--check-seconds",
        type=float,
        default=env("OUTBOX_CHECK_SECONDS", "300"),
        help="seconds between two looks at a kind for changes that its watch missed",
    )
    add("--log-level", type=str.upper, default=env("OUTBOX_LOG_LEVEL", "INFO"))
    add(
        "--unrestricted-pod-templates",
        dest="unrestricted",
        action="store_true",
        default=env("OUTBOX_UNRESTRICTED_POD_TEMPLATES", "false") == "true",
        help="let a podTemplate ask for anything: who may create a resource may then be root on a node",
    )
    add(
        "--rollout-max-concurrent",
        dest="budget",
        type=read_budget,
        default=env("OUTBOX_ROLLOUT_MAX_CONCURRENT", "10%"),
        help="replace the pods of so many processors at a time when the operator's version changed: 3, or 10%%",
    )
    return parser


def _add_images(add: Callable[..., object], env: Callable[[str, str], str]) -> None:
    """Add the flags of `Images`."""
    add("--worker-image", dest="worker", default=env("OUTBOX_WORKER_IMAGE", Images.worker))
    add("--spark-image", dest="spark", default=env("OUTBOX_SPARK_IMAGE", Images.spark))
    add("--spark-driver-role", dest="driver_role", default=env("OUTBOX_SPARK_DRIVER_ROLE", Images.driver_role))
    add(
        "--no-worker-budgets",
        dest="budgets",
        action="store_false",
        default=env("OUTBOX_WORKER_BUDGETS", "true") != "false",
        help="make no PodDisruptionBudgets: of two about one pod Kubernetes evicts it for neither",
    )
    add(
        "--run-as-user",
        dest="user",
        type=lambda text: int(text) if text else None,
        default=env("OUTBOX_RUN_AS_USER", str(Images.user)),
        help="uid, gid and fsGroup of the pods of processors; empty: none is set, for OpenShift assigns them",
    )
    add(
        "--runbook-url",
        dest="runbook",
        default=env("OUTBOX_RUNBOOK_URL", Images.runbook),
        help="where docs/runbook.md is published: messages of conditions link to its sections",
    )


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read flags and environment."""
    read = vars(_build_parser(environment).parse_args(arguments))
    named = read.pop("namespaces") or environment.get("OUTBOX_WATCH_NAMESPACES", "").split(",")
    images = Images(**{each.name: read.pop(each.name) for each in fields(Images) if each.name in read})
    return Settings(namespaces=tuple(name.strip() for name in named if name.strip()), images=images, **read)
