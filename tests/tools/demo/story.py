"""The demo from beginning to end. What happens when is here; how it happens is in the modules it calls."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from tests.tools.demo.cluster import Cluster
from tests.tools.demo.install import Installation
from tests.tools.demo.intruders import edited_row, frozen_replica, outside_worker, script, second_resource, spark_replay
from tests.tools.demo.memory import measure_memory
from tests.tools.demo.place import (
    ANALYTICS,
    BESIDE,
    EXAMPLES,
    LOYALTY,
    NAMESPACE,
    OPERATOR_NAMESPACE,
    OTHER_NAMESPACE,
    PARCELS,
    PROCESSORS,
    PROJECTION,
    RABBITMQ,
    RELEASE,
    SEARCH,
)
from tests.tools.demo.producing.shop import Shop
from tests.tools.demo.scene import Demo
from tests.tools.demo.scenes import beside
from tests.tools.demo.scenes.kills import KilledBatch, kill_driver, kill_projection, kill_publisher
from tests.tools.demo.tracks import Tracks
from tests.tools.demo.verdict import print_measures, take_stock, wait_until_drained
from tests.tools.demo.waiting import PATIENCE, wait_for
from tests.tools.ledger.table import format_table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.tools.demo.place import Place
    from tests.tools.demo.progress import Progress
    from tests.tools.ledger.amqp import Broker

FIRST_MESSAGE_WITHIN: Final = {PROJECTION: 10.0, ANALYTICS: 60.0}
"""Seconds from kubectl apply to the first message handled, of a worker and of Spark: the one limit of each. Later fails
the demo; README.md names the limit of Spark."""
MEASURED_WITHIN: Final = 120.0
"""Seconds in which a start that is too late is still measured, to say by how much."""
READY_WITHIN: Final = 120.0
FIRST_ROW: Final = {
    PROJECTION: "SELECT EXISTS (SELECT FROM projection.handled_orders)",
    ANALYTICS: "SELECT EXISTS (SELECT FROM analytics.orders_per_minute)",
}
MANIFEST: Final = {
    PROJECTION: "orders-projection.yaml",
    LOYALTY: "orders-loyalty",
    RABBITMQ: "orders-to-rabbitmq.yaml",
    ANALYTICS: "orders-analytics",
    PARCELS: "orders-modes/competing.yaml",
    SEARCH: "orders-modes/partitioned.yaml",
}


class Story:
    """One run."""

    def __init__(self, place: Place, progress: Progress, messages: int, seconds: float, seed: int) -> None:
        """Keep the settings; nothing is touched."""
        self._place, self._progress = place, progress
        self._messages, self._seconds, self._seed = messages, seconds, seed
        self._cluster = Cluster(place)
        self._installation = Installation(place, self._cluster, progress)
        self._shop: Shop | None = None
        self._killed: list[KilledBatch] = []
        self._missed: list[str] = []
        self._broker: Broker | None = None

    def run(self) -> list[str]:
        """Play everything; return what was wrong (empty: nothing)."""
        self._installation.clear()
        self._installation.install()
        with self._progress.step("database, the outbox's schema, the shop's tables"):
            database, application = self._installation.prepare_database()
        demo = Demo(self._place, self._cluster, database, application, self._progress)
        log_dir = self._place.fresh_log_dir()
        self._shop = Shop(application, log_dir, messages=self._messages, seconds=self._seconds, seed=self._seed)
        self._progress.say(f"producers: {self._messages:,} order messages at least, 8 connections, seed {self._seed}")
        with self._progress.table(self._table):
            self._apply(demo)
            self._play(demo, self._shop)
            self._play_beside(demo, self._shop)
            with self._progress.step("producers come to an end"):
                self._shop.finish()
            self._progress.say(f"transactions by kind: {format_kinds(self._shop.kinds)}")
            with self._progress.step("every processor reaches the end of the outbox"):
                wait_until_drained(demo)
        return self._conclude(demo, log_dir)

    def _apply(self, demo: Demo) -> None:
        """Apply the examples that need no broker and see how long a worker, and Spark, take to a first message.

        Beside the producers and the processors that run, but before anything is killed or started against them: each of
        those costs a second or two of processor time, and these figures are to tell what a start takes.
        """
        for name in FIRST_MESSAGE_WITHIN:
            self._measure_first(demo, name, self._apply_example(name))
        self._apply_example(LOYALTY)

    def _apply_example(self, name: str) -> float:
        """Apply one example; return when that began."""
        began = time.monotonic()
        self._cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(EXAMPLES / MANIFEST[name]))
        self._progress.say(f"kubectl apply -f examples/{MANIFEST[name]}")
        return began

    def _apply_publisher(self) -> None:
        with self._progress.step("RabbitMQ is ready, on a volume, with exchange and queue"):
            self._broker = self._installation.open_broker()
        self._apply_example(RABBITMQ)

    def _measure_first(self, demo: Demo, name: str, applied: float) -> None:
        """See the first message handled; note how long that took, and whether it was within the limit."""
        query = FIRST_ROW[name]
        what = f"{name} handles its first message"
        wait_for(what, lambda: demo.database.one(query) == (True,), within=MEASURED_WITHIN, poll=0.1)
        judged, late = judge_first(FIRST_MESSAGE_WITHIN[name], time.monotonic() - applied, local=self._place.local)
        if late:
            self._missed.append(f"{name} handled its first message after {judged}")
        self._progress.say(f"{name}: first message after kubectl apply: {judged}")
        demo.measured.append((f"kubectl apply to first message, {name}", judged))

    def _ready(self, demo: Demo, name: str) -> None:
        wait_for(
            f"{name} is Ready", lambda: demo.cluster.processor(name).is_condition("Ready", "True"), within=READY_WITHIN
        )

    def _play(self, demo: Demo, shop: Shop) -> None:
        """Play intruders and kills while the producers run; those of different processors at once."""
        ready = {name: partial(self._ready, demo, name) for name in PROCESSORS}
        Tracks(
            {
                PROJECTION: [
                    ready[PROJECTION],
                    partial(script.run, demo),
                    partial(outside_worker.run, demo),
                    partial(kill_projection, demo),
                ],
                LOYALTY: [ready[LOYALTY], partial(frozen_replica.run, demo), partial(edited_row.run, demo)],
                RABBITMQ: [
                    self._apply_publisher,
                    ready[RABBITMQ],
                    lambda: self._killed.append(kill_publisher(demo)),
                    partial(second_resource.run, demo),
                ],
                ANALYTICS: [
                    ready[ANALYTICS],
                    partial(spark_replay.run, demo),
                    partial(kill_driver, demo),
                ],
            }
        ).join(shop)

    def _play_beside(self, demo: Demo, shop: Shop) -> None:
        """Let two processors of other modes read the same messages from their beginning; see what each is for."""
        for name in BESIDE:
            self._apply_example(name)
        Tracks(
            {
                PARCELS: [partial(self._ready, demo, PARCELS), partial(beside.lose_consumer, demo)],
                SEARCH: [partial(self._ready, demo, SEARCH), partial(beside.open_elsewhere, demo)],
            }
        ).join(shop)

    def _conclude(self, demo: Demo, log_dir: Path) -> list[str]:
        """Settle the accounts."""
        measure_memory(demo)
        broker = self._broker or self._installation.open_broker()
        with self._progress.step("the ledger counts"):
            failures = take_stock(demo, log_dir, broker, self._killed, self._seed)
        print_measures(demo)
        return self.judge(failures)

    def judge(self, failures: list[str]) -> list[str]:
        """Put what the ledger found and starts that were late together: either fails the demo."""
        return failures + self._missed

    def _table(self) -> list[str]:
        rows: list[tuple[str, ...]] = [("processor", "phase", "owner", "checkpoint", "lag", "conflicts")]
        for name in (*PROCESSORS, *BESIDE):
            status = self._cluster.processor(name).status
            owner = str((status.get("owner") or {}).get("pod", "-"))
            pair = str((status.get("checkpoint") or {}).get("pair", "-"))
            lag = str((status.get("lag") or {}).get("text", "-"))
            conflicts = str((status.get("conflicts") or {}).get("count", 0))
            rows.append((name, str(status.get("phase", "-")), owner, pair, lag, conflicts))
        committed = self._shop.committed if self._shop else 0
        return [*format_table(rows), f"committed by the producers: {committed:,}"]

    def print_state(self) -> None:
        """Print what a person would look at first when something is wrong."""
        for command in (
            ("get", "pods", "-A", "-o", "wide"),
            ("get", "obp", "-A", "-o", "wide"),
            ("get", "obp", "-n", NAMESPACE, "-o", "yaml"),
            ("get", "events", "-n", NAMESPACE, "--sort-by=.lastTimestamp"),
            ("logs", "-n", "outbox-system", "deploy/outbox-operator", "--tail=60"),
        ):
            self._progress.print_lines([f"$ kubectl {' '.join(command)}"])
            self._progress.print_lines(self._cluster.kubectl(*command, check=False).splitlines()[-150:])

    def print_what_next(self) -> None:
        """Say what to try with the cluster, which stays up."""
        variable = f"export KUBECONFIG={self._place.kubeconfig}"
        name = PROJECTION
        lines = ["The cluster stays up. Try:", f"  {variable}"]
        if self._place.local:
            lines.append(f"  export PATH={self._place.programs}:$PATH   # kubectl and helm")
        lines += [
            f"  kubectl get obp -n {NAMESPACE} -o wide",
            f"  kubectl describe obp -n {NAMESPACE} {LOYALTY}",
            f'  kubectl patch obp -n {NAMESPACE} {name} --type merge -p \'{{"spec":{{"suspend":true}}}}\'',
            f"  kubectl delete obp -n {NAMESPACE} {name}; kubectl apply -n {NAMESPACE} -f examples/{MANIFEST[name]}",
        ]
        if self._place.local:
            lines.append("  make down   # removes everything that was started")
        else:
            lines += [
                "and to remove what the demo made:",
                f"  kubectl delete obp --all -n {NAMESPACE}; kubectl delete obp --all -n {OTHER_NAMESPACE}",
                f"  helm uninstall {RELEASE} -n {OPERATOR_NAMESPACE}",
                f"  kubectl delete namespace {NAMESPACE} {OTHER_NAMESPACE} {OPERATOR_NAMESPACE}",
                f"  kubectl delete clusterrole {OPERATOR_NAMESPACE}:{RELEASE}:spark-driver",
                "  kubectl delete crd outboxprocessors.outbox-operator.dev",
            ]
        self._progress.print_lines(lines)

    def close(self) -> None:
        """End what this process started besides the cluster."""
        if self._shop:
            self._shop.stop()
        self._installation.close()


def judge_first(limit: float, seconds: float, *, local: bool) -> tuple[str, bool]:
    """Say how long a start took beside its limit, and whether it was late; a cluster of the user's own is not judged.

    Such a cluster fetches images first, which is no time of ours.
    """
    allowed = limit * PATIENCE
    if not local:
        return f"{seconds:.1f} s (not judged: images may be fetched first)", False
    late = seconds > allowed
    return f"{seconds:.1f} s (at most {allowed:.0f} s{': MISSED' if late else ''})", late


def format_kinds(kinds: dict[str, int]) -> str:
    """Write counts by kind."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
