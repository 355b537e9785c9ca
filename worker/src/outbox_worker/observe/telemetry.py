"""Prometheus metrics, computed from the process status when they are asked for: no request touches the database.

The first scrape imports this module: Prometheus' client is about a twentieth of what a worker's start would import.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from typing_extensions import override

from outbox_core.breaker import Phase
from outbox_core.progress.checkpoint import parse_checkpoint
from outbox_core.report import RebuildState, WorkerState
from outbox_worker.observe.status import BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from outbox_core.report import FailureSummary, Report
    from outbox_worker.observe.status import ProcessStatus


def render(status: ProcessStatus) -> bytes:
    """Return the text exposition of one process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(StatusCollector(status))
    return generate_latest(registry)


class StatusCollector(Collector):
    """Reads the process status once for each scrape."""

    def __init__(self, status: ProcessStatus) -> None:
        """Keep the process status."""
        self._status = status

    @override
    def collect(self) -> Iterator[Metric]:
        report = self._status.report()
        labels = [report.processor_id]
        yield from self._counters(labels)
        yield from _gauges(report, labels, self._status.failures)
        yield from _pairs(report, labels)
        yield from _holder(report, labels)
        yield from _leases(report, labels)
        yield from _unfinished(report, labels)
        state = GaugeMetricFamily("outbox_state", "1 for the state the worker is in.", labels=["processor", "state"])
        for each in WorkerState:
            state.add_metric([*labels, each.value], float(each is report.state))
        yield state
        reason = GaugeMetricFamily(
            "outbox_state_reason", "1: why the worker is in its state.", labels=["processor", "state", "reason"]
        )
        reason.add_metric([*labels, report.state.value, report.reason.value], 1.0)
        yield reason
        circuit = GaugeMetricFamily(
            "outbox_circuit", "1 for what the target's circuit breaker lets through.", labels=["processor", "phase"]
        )
        for phase in Phase:
            circuit.add_metric([*labels, phase.value], float(phase.value == report.circuit))
        yield circuit

    def _counters(self, labels: list[str]) -> Iterator[Metric]:
        handled = CounterMetricFamily(
            "outbox_messages_handled", "Messages handled by this process.", labels=["processor"]
        )
        handled.add_metric(labels, float(self._status.handled))
        yield handled
        batches = CounterMetricFamily("outbox_batches", "Batches stored by this process.", labels=["processor"])
        batches.add_metric(labels, float(self._status.batches))
        yield batches
        seconds = HistogramMetricFamily(
            "outbox_batch_seconds",
            "Time from a batch in hand to its checkpoint stored, or to its failure.",
            labels=["outcome"],
        )
        for outcome, each in self._status.batch_seconds.items():
            numbers = zip([*map(str, BUCKETS), "+Inf"], accumulate(each.counts), strict=True)
            seconds.add_metric([outcome], [(bound, float(count)) for bound, count in numbers], each.total)
        yield seconds
        refusals = CounterMetricFamily(
            "outbox_conflicts",
            "Answers of store_processor_checkpoint to this process that were not 1, by code.",
            labels=["processor", "code"],
        )
        for code, count in sorted(self._status.refusals.items()):
            refusals.add_metric([*labels, str(code)], float(count))
        yield refusals


def _gauges(report: Report, labels: list[str], failures: FailureSummary | None) -> Iterator[Metric]:
    """What is not known has no series: a 0 in its place would be a change."""
    lease = report.lease
    values: list[tuple[str, str, float | None]] = [
        ("outbox_lag_messages", "Messages committed behind the checkpoint (at least, beyond the cap).",
         report.lag.messages if report.lag else None),
        ("outbox_lag_seconds", "Age of the oldest of them.", report.lag.seconds if report.lag else None),
        ("outbox_bound_age_seconds", "For how long the high-water mark has not moved though messages wait behind it.",
         report.bound.age_seconds if report.bound else None),
        ("outbox_bound_stalled", "1 while the high-water mark has stood still for too long (condition SourceCurrent).",
         float(report.bound.stalled) if report.bound else None),
        ("outbox_attempt", "Failed attempts of the batch in hand.", report.attempt),
        ("outbox_owner", "1 while this process holds the lease.", float(lease is not None and lease.held)),
        ("outbox_epoch", "Epoch of the lease that this process holds.", lease.epoch if lease else None),
        ("outbox_partitions", "Into how many partitions the processor is divided.",
         report.division.count if report.division else None),
        ("outbox_partitions_next", "Into how many it shall be; the same while that does not change.",
         (report.division.next_count or report.division.count) if report.division else None),
        ("outbox_partitions_at_line", "Of these, how many wait at the barrier for their number to change.",
         report.division.at_line if report.division else None),
        ("outbox_conflicts_recorded", "Refusals recorded in the database, over all workers.", report.conflicts.count),
        ("outbox_conflict_open", "1 while a conflict waits for a person.", float(report.conflicts.open is not None)),
        ("outbox_held_messages", "Messages held: failing, behind one of their key, or delayed (up to 10,000).",
         failures.held if failures else None),
        ("outbox_dead_letters", "Messages that wait for a person, with their error (up to 10,000).",
         failures.dead_letters if failures else None),
        ("outbox_blocked_keys", "Keys whose messages wait for one that failed (up to 5).",
         len(failures.blocked_keys) if failures else None),
        ("outbox_stranger_refusals", "Refused calls of unknown callers (approximate).", report.conflicts.strangers),
        ("outbox_rebuild_behind_messages", "Messages between this checkpoint and that of the one it replaces.",
         report.rebuild.behind if report.rebuild else None),
        ("outbox_rebuild_swapped", "1 once this processor has replaced the other one.",
         float(report.rebuild.state == RebuildState.SWAPPED) if report.rebuild else None),
    ]  # fmt: skip
    for name, text, value in values:
        if value is not None:
            gauge = GaugeMetricFamily(name, text, labels=["processor"])
            gauge.add_metric(labels, float(value))
            yield gauge


def _leases(report: Report, labels: list[str]) -> Iterator[Metric]:
    """Mode Partitioned: who owns what, and in which epoch. A partition without an owner has none."""
    if not report.leases:
        return
    owned = GaugeMetricFamily(
        "outbox_partition_owned", "1 for a partition whose lease this process holds.", labels=["processor", "partition"]
    )
    epochs = GaugeMetricFamily(
        "outbox_partition_epoch", "Epoch of the partition's lease.", labels=["processor", "partition"]
    )
    for lease in report.leases:
        owned.add_metric([*labels, str(lease.partition)], float(lease.held))
        epochs.add_metric([*labels, str(lease.partition)], float(lease.epoch or 0))
    yield owned
    yield epochs


def _unfinished(report: Report, labels: list[str]) -> Iterator[Metric]:
    """Mode Competing: the same from every consumer, so take the maximum over them."""
    seen = report.unfinished
    if seen is None:
        return
    for name, text, value in (
        ("outbox_unfinished_messages", "Messages handed out to consumers and not done.", float(seen.messages)),
        ("outbox_unfinished_batches", "Batches handed out and not done.", float(seen.batches)),
        ("outbox_free_batches", "Batches handed back or lapsed, that no consumer has claimed yet.", float(seen.free)),
        ("outbox_retrying_messages", "Messages that failed and wait, are delayed, or redriven.", float(seen.retries)),
        ("outbox_consumers", "Processes that take batches.", float(seen.consumers)),
        ("outbox_oldest_batch_seconds", "Age of the oldest batch that is not done.", seen.oldest_seconds),
    ):
        gauge = GaugeMetricFamily(name, text, labels=["processor"])
        gauge.add_metric(labels, value)
        yield gauge


def _pairs(report: Report, labels: list[str]) -> Iterator[Metric]:
    transaction_id = GaugeMetricFamily(
        "outbox_checkpoint_transaction_id", "First half of the stored checkpoint.", labels=["processor", "partition"]
    )
    position = GaugeMetricFamily(
        "outbox_checkpoint_position", "Second half of the stored checkpoint.", labels=["processor", "partition"]
    )
    for view in report.checkpoints:
        pair = parse_checkpoint(view.pair)
        transaction_id.add_metric([*labels, str(view.partition)], float(pair.transaction_id))
        position.add_metric([*labels, str(view.partition)], float(pair.position))
    yield transaction_id
    yield position


def _holder(report: Report, labels: list[str]) -> Iterator[Metric]:
    """Who holds the high-water mark back, only while that is a stall.

    So its labels do not multiply with every short writer.
    """
    if report.bound is None or report.bound.held_by is None or not report.bound.stalled:
        return
    held = report.bound.held_by
    names = ("kind", "pid", "application", "database", "role", "prepared", "holder_processor")
    values = (held.kind, held.pid, held.application, held.database, held.role, held.prepared, held.processor)
    gauge = GaugeMetricFamily(
        "outbox_bound_holder_age_seconds",
        "Who holds the high-water mark back; for how long its transaction is open (0: hidden).",
        labels=["processor", *names],
    )
    gauge.add_metric([*labels, *("" if value is None else str(value) for value in values)], held.age_seconds or 0.0)
    yield gauge
    others = GaugeMetricFamily(
        "outbox_bound_waiting_writers", "Further open transactions that hold it next.", labels=["processor"]
    )
    others.add_metric(labels, float(report.bound.others))
    yield others
