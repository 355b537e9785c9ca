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
    from collections.abc import Iterable, Iterator, Sequence
    from typing import TypeAlias

    from prometheus_client.metrics_core import Metric

    from outbox_core.report import Report
    from outbox_worker.observe.status import ProcessStatus

    Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


def render(statuses: Sequence[ProcessStatus]) -> bytes:
    """Return the text exposition of one process, of one processor or several."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(StatusCollector(statuses))
    return generate_latest(registry)


class StatusCollector(Collector):
    """Reads each status once for each scrape."""

    def __init__(self, statuses: Sequence[ProcessStatus]) -> None:
        self._statuses = statuses

    @override
    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for status in self._statuses:
            for found in _collect(status):
                found.samples = [each._replace(labels={**each.labels, **status.labels}) for each in found.samples]
                family = families.setdefault(found.name, found)
                if family is not found:  # another processor's: a family stands once in the text
                    family.samples += found.samples
        yield from families.values()


def _collect(status: ProcessStatus) -> Iterator[Metric]:
    report = status.report()
    yield from _counters(report, status)
    yield from _gauges(report)
    yield from _pairs(report)
    yield from _holder(report)
    yield from _leases(report)
    states = [((each.value,), each is report.state) for each in WorkerState]
    yield _gauge(report, "outbox_state", "1 for the state the worker is in.", states, "state")
    why = [((report.state.value, report.reason.value), 1)]
    yield _gauge(report, "outbox_state_reason", "1: why the worker is in its state.", why, "state", "reason")
    phases = [((phase.value,), phase.value == report.circuit) for phase in Phase]
    yield _gauge(report, "outbox_circuit", "1 for what the target's circuit breaker lets through.", phases, "phase")


def _counters(report: Report, status: ProcessStatus) -> Iterator[Metric]:
    yield _counter(report, "outbox_messages_handled", "Messages handled by this process.", [((), status.handled)])
    yield _counter(report, "outbox_batches", "Batches stored by this process.", [((), status.batches)])
    seconds = HistogramMetricFamily(
        "outbox_batch_seconds",
        "Time from a batch in hand to its checkpoint stored, or to its failure.",
        labels=["processor", "outcome"],
    )
    for outcome, each in status.batch_seconds.items():
        numbers = zip([*map(str, BUCKETS), "+Inf"], accumulate(each.counts), strict=True)
        counted = [(bound, float(count)) for bound, count in numbers]
        seconds.add_metric([report.processor_id, outcome], counted, each.total)
    yield seconds
    text = "Answers of store_processor_checkpoint to this process that were not 1, by code."
    codes = [((str(code),), count) for code, count in sorted(status.refusals.items())]
    yield _counter(report, "outbox_conflicts", text, codes, "code")


def _gauge(report: Report, name: str, text: str, values: Samples, *labels: str) -> Metric:
    """Return a gauge of the processor: its values by those of its further labels."""
    return _fill(GaugeMetricFamily(name, text, labels=["processor", *labels]), report, values)


def _counter(report: Report, name: str, text: str, values: Samples, *labels: str) -> Metric:
    return _fill(CounterMetricFamily(name, text, labels=["processor", *labels]), report, values)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, report: Report, values: Samples) -> Metric:
    for labels, value in values:
        family.add_metric([report.processor_id, *labels], float(value))
    return family


def _gauges(report: Report) -> Iterator[Metric]:
    """What is not known has no series: a 0 in its place would be a change."""
    lease, failures, unfinished = report.lease, report.failures, report.unfinished
    values: list[tuple[str, str, float | None]] = [
        ("outbox_lag_messages", "Messages committed behind the checkpoint (at least, beyond the cap).",
         report.lag.messages if report.lag else None),
        ("outbox_lag_seconds", "Age of the oldest of them.", report.lag.seconds if report.lag else None),
        ("outbox_high_water_mark_age_seconds", "For how long it has not moved though messages wait behind it.",
         report.high_water_mark.age_seconds if report.high_water_mark else None),
        ("outbox_high_water_mark_stalled", "1 while it has stood still for too long (condition SourceCurrent).",
         float(report.high_water_mark.stalled) if report.high_water_mark else None),
        ("outbox_attempt", "Failed attempts of the batch in hand.", report.attempt),
        ("outbox_owner", "1 while this process holds the lease.", float(lease is not None and lease.held)),
        ("outbox_epoch", "Epoch of the lease that this process holds.", lease.epoch if lease else None),
        ("outbox_partitions", "How many partitions the processor has.",
         report.partitioning.count if report.partitioning else None),
        ("outbox_partitions_next", "Into how many it shall be; the same while that does not change.",
         (report.partitioning.next_count or report.partitioning.count) if report.partitioning else None),
        ("outbox_partitions_at_barrier", "Of these, how many wait at the barrier for their number to change.",
         report.partitioning.at_barrier if report.partitioning else None),
        ("outbox_conflicts_recorded", "Refusals recorded in the database, over all workers.", report.conflicts.count),
        ("outbox_conflict_open", "1 while a conflict waits for a person.", float(report.conflicts.open is not None)),
        ("outbox_held_messages", "Messages held: failing, behind one of their key, or delayed (up to 10,000).",
         failures.held if failures else None),
        ("outbox_dead_letters", "Messages that wait for a person, with their error (up to 10,000).",
         failures.dead_letters if failures else None),
        ("outbox_blocked_keys", "Keys whose messages wait for one that failed (up to 5).",
         len(failures.blocked_keys) if failures else None),
        ("outbox_unowned_calls", "Refused calls of unknown callers (approximate).", report.conflicts.unowned_calls),
        ("outbox_rebuild_behind_messages", "Messages between this checkpoint and that of the one it replaces.",
         report.rebuild.behind if report.rebuild else None),
        ("outbox_rebuild_swapped", "1 once this processor has replaced the other one.",
         float(report.rebuild.state == RebuildState.SWAPPED) if report.rebuild else None),
        # Mode Competing: the same from every consumer, so take the maximum over them.
        ("outbox_unfinished_messages", "Messages handed out to consumers and not done.",
         unfinished.messages if unfinished else None),
        ("outbox_unfinished_batches", "Batches handed out and not done.", unfinished.batches if unfinished else None),
        ("outbox_free_batches", "Batches handed back or lapsed, that no consumer has claimed yet.",
         unfinished.free if unfinished else None),
        ("outbox_retrying_messages", "Messages that failed, are delayed, or redriven (up to 10,000).",
         unfinished.retries if unfinished else None),
        ("outbox_consumers", "Processes that take batches.", unfinished.consumers if unfinished else None),
        ("outbox_oldest_batch_seconds", "Age of the oldest batch that is not done.",
         unfinished.oldest_seconds if unfinished else None),
    ]  # fmt: skip
    for name, text, value in values:
        if value is not None:
            yield _gauge(report, name, text, [((), value)])


def _leases(report: Report) -> Iterator[Metric]:
    """Mode Partitioned: who owns what, and in which epoch. A partition without an owner has none."""
    if not report.leases:
        return
    owned = [((str(lease.partition),), lease.held) for lease in report.leases]
    text = "1 for a partition whose lease this process holds."
    yield _gauge(report, "outbox_partition_owned", text, owned, "partition")
    epochs = [((str(lease.partition),), lease.epoch or 0) for lease in report.leases]
    yield _gauge(report, "outbox_partition_epoch", "Epoch of the partition's lease.", epochs, "partition")


def _pairs(report: Report) -> Iterator[Metric]:
    pairs = [((str(view.partition),), parse_checkpoint(view.pair)) for view in report.checkpoints]
    ids = [(partition, pair.transaction_id) for partition, pair in pairs]
    text = "First half of the stored checkpoint."
    yield _gauge(report, "outbox_checkpoint_transaction_id", text, ids, "partition")
    positions = [(partition, pair.position) for partition, pair in pairs]
    yield _gauge(report, "outbox_checkpoint_position", "Second half of the stored checkpoint.", positions, "partition")


def _holder(report: Report) -> Iterator[Metric]:
    """Who holds the high-water mark back, only while that is a stall.

    So its labels do not multiply with every short writer.
    """
    if report.high_water_mark is None or report.high_water_mark.held_by is None or not report.high_water_mark.stalled:
        return
    held = report.high_water_mark.held_by
    names = ("kind", "pid", "application", "database", "role", "prepared", "holder_processor")
    values = (held.kind, held.pid, held.application, held.database, held.role, held.prepared, held.processor)
    age = [(tuple("" if value is None else str(value) for value in values), held.age_seconds or 0.0)]
    text = "Who holds the high-water mark back; for how long its transaction is open (0: hidden)."
    yield _gauge(report, "outbox_high_water_mark_holder_age_seconds", text, age, *names)
    text = "Further open transactions that hold it next."
    yield _gauge(report, "outbox_high_water_mark_waiting_writers", text, [((), report.high_water_mark.others)])
