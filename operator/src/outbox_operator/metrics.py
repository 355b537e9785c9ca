"""Prometheus metrics of the operator; a worker's own metrics are at the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from outbox_operator.api.resources import KIND
from outbox_operator.api.status import conditions_of, true_conditions
from outbox_operator.watch.store import Store, processor_id_of

if TYPE_CHECKING:
    from collections.abc import Iterable

RECONCILE_SECONDS: Final = Histogram(
    "outbox_operator_reconcile_seconds",
    "Duration of one reconcile.",
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10),
)
RECONCILE_FAILURES: Final = Counter("outbox_operator_reconcile_failures", "Reconciles that failed and are tried again.")
QUEUE_DEPTH: Final = Gauge("outbox_operator_queue_depth", "Resources that are due and wait.")
MISSED_CHANGES: Final = Counter(
    "outbox_operator_missed_changes", "Changes that a listing found and no watch had delivered."
)
FAILED_ROUNDS: Final = Counter(
    "outbox_operator_failed_rounds", "Times that a kind could not be listed: what its watch missed is not found."
)
LEADER: Final = Gauge("outbox_operator_leader", "1 in the active process.")


@dataclass(frozen=True, slots=True)
class ProcessorCollector:
    """Reads the resources' figures out of the store when it is scraped."""

    _store: Store

    def collect(self) -> Iterable[Metric]:
        """Build the gauges."""
        labels = ["namespace", "name", "processor_id"]
        ready = GaugeMetricFamily("outbox_processor_ready", "1: what was asked is so.", labels=labels)
        messages = GaugeMetricFamily("outbox_processor_lag_messages", "Messages that wait.", labels=labels)
        seconds = GaugeMetricFamily("outbox_processor_lag_seconds", "Age of the oldest.", labels=labels)
        held = GaugeMetricFamily("outbox_processor_held_messages", "Messages held.", labels=labels)
        dead = GaugeMetricFamily("outbox_processor_dead_letters", "Messages that wait for a person.", labels=labels)
        conflicts = GaugeMetricFamily(
            "outbox_processor_conflicts", "Refusals since the processor exists.", labels=[*labels, "code"]
        )
        conditions = GaugeMetricFamily(
            "outbox_processor_condition",
            "1 for the status that a condition has: True, False or Unknown.",
            labels=[*labels, "type", "status", "reason"],
        )
        for body in self._store.all_of(KIND):
            meta, status = body["metadata"], body.get("status") or {}
            names = [meta["namespace"], meta["name"], processor_id_of(body)]
            ready.add_metric(names, float("Ready" in true_conditions(body)))
            for each in conditions_of(body).values():
                conditions.add_metric([*names, each["type"], each["status"], each["reason"]], 1.0)
            if "lag" in status:
                messages.add_metric(names, status["lag"]["messages"])
                seconds.add_metric(names, status["lag"]["seconds"])
            failures = status.get("failures") or {}
            if failures:
                held.add_metric(names, failures.get("held", 0))
                dead.add_metric(names, failures.get("deadLetters", 0))
            for code, count in ((status.get("conflicts") or {}).get("byCode") or {}).items():
                conflicts.add_metric([*names, code], count)
        return [ready, messages, seconds, held, dead, conflicts, conditions]


def register(store: Store) -> None:
    """Serve the resources' figures."""
    REGISTRY.register(ProcessorCollector(store))
