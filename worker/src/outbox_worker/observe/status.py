"""What this process says of itself: written by main loop and heartbeat, read by the HTTP server and at the end."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, TypedDict, Unpack

from outbox_core.processor.summary import is_ready, summarize
from outbox_core.report import CheckpointView, Intent, LeaseView, Report, WorkerState
from outbox_worker.logs import get_logger
from outbox_worker.postgres.ownership.process_statuses import PartitionState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.processor.state import ProcessorState
    from outbox_core.report import (
        ConflictSummary,
        FailureSummary,
        HighWaterMark,
        Lag,
        PartitioningView,
        RebuildView,
        ResourceRef,
        Unfinished,
    )

_log = get_logger("outbox.worker")
_TOLD: Final = frozenset(
    {WorkerState.ACTIVE, WorkerState.RETRYING, WorkerState.STOPPED, WorkerState.BLOCKED, WorkerState.UNAVAILABLE}
)
"""What a process says of a partition in the database too."""
_NOT_OURS: Final = frozenset({WorkerState.STANDBY, WorkerState.CLAIM_REFUSED})
"""Another process speaks for the partition. In all other states what was said last stays: what was before the end is
what a person wants to know."""
_LONGEST: Final = 300
TERMINATION_BYTES: Final = 4000
"""The kubelet keeps 4,096; a report that was cut in the middle could not be read."""
ACTIVITY_SECONDS: Final = 10.0
"""Between two lines of the log that say what was handled."""
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds: bounds by which the times of batches are told apart."""
_SHOWN: Final = 4
_MESSAGE: Final = 1000
_ERROR: Final = 1500


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is."""

    pod: str
    pod_uid: str
    instance: str


@dataclass(slots=True)
class BatchSeconds:
    """How long batches took.

    Attributes:
        counts: of those up to each of BUCKETS and beyond the one before it; the last one's have no bound.
        total: of all their seconds.

    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Take one more."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


class Observed(TypedDict, total=False):
    """Fields of the report that were seen in the database."""

    checkpoints: list[CheckpointView]
    leases: list[LeaseView]
    partitioning: PartitioningView | None
    lag: Lag | None
    high_water_mark: HighWaterMark
    conflicts: ConflictSummary
    failures: FailureSummary
    unfinished: Unfinished
    rebuild: RebuildView


class ProcessStatus:
    """The latest of everything; behind one lock what is more than one value, or is counted."""

    def __init__(
        self, config: ProcessorConfig, identity: Identity, initial: ProcessorState, *, is_shared: bool = False
    ) -> None:
        self.is_shared = is_shared
        """The process has other processors too, or may have."""
        self.names: dict[str, object] = {"processor": config.processor_id} if is_shared else {}
        """What tells lines of the log about this processor from those about others of the process."""
        self.resource = config.resource.name
        self.labels = {"resource": self.resource} if is_shared else {}
        """What metrics of such a process have besides, for the labels of its pod are those of none of its resources."""
        self._lock = threading.Lock()
        self._config = config
        self._identity = identity
        self._ask: dict[int, Callable[[], ProcessorState]] = {0: lambda: initial}
        self._partitions: dict[int, PartitionState] = {}
        self._observed: Observed = {}
        self._last_error: str | None = None
        self.claim_holder: ResourceRef | None = None
        self.lease_pod: str | None = None
        """Who holds the lease."""
        self.executors: int | None = None
        """Engine Spark: how many are alive."""
        self.advice: str | None = None
        """What a person should do although all goes on."""
        self.circuit: Callable[[], str] | None = None
        """Whom to ask what the target's breaker lets through."""
        self.intent: Intent | None = None
        """What the operator last said about the claim."""
        self.handled = 0
        self.batches = 0
        self.batch_seconds = {"stored": BatchSeconds(), "failed": BatchSeconds()}
        """From a batch in hand to its checkpoint stored, or to its failure."""
        self.refusals: dict[int, int] = {0: 0, 2: 0, 3: 0, 4: 0}

    @property
    def _states(self) -> dict[int, ProcessorState]:
        return {partition: ask() for partition, ask in self._ask.items()}

    def watch(self, partition: int, ask: Callable[[], ProcessorState]) -> None:
        """Take whom to ask for the state of one partition; any thread may ask, for each report."""
        with self._lock:
            self._ask[partition] = ask

    def note_change(self, partition: int, state: ProcessorState) -> None:
        """Take what is to be said of a partition in the database: its state, reason or message changed."""
        with self._lock:
            if state.state in _TOLD:
                self._partitions[partition] = PartitionState(
                    partition, state.state, state.reason, state.message[:_LONGEST]
                )
            elif state.state in _NOT_OURS:
                self._partitions.pop(partition, None)

    @property
    def partition_statuses(self) -> tuple[PartitionState, ...]:
        """What this process says of its partitions in the database."""
        with self._lock:
            return tuple(self._partitions.values())

    def rebalance(self, count: int, initial: ProcessorState) -> None:
        """Forget the partitions: there are `count` now."""
        with self._lock:
            self._ask = dict.fromkeys(range(count), lambda: initial)
            self._partitions = {}
            self._observed |= {"checkpoints": [], "leases": [], "lag": None, "partitioning": None}

    def set_observed(self, **seen: Unpack[Observed]) -> None:
        """Take what was seen in the database; what is not named stays."""
        with self._lock:
            self._observed |= seen

    def add_batch(self, count: int, seconds: float | None = None) -> None:
        """Count a batch that was stored, and how long it took where that is known."""
        with self._lock:
            self.batches += 1
            self.handled += count
            if seconds is not None:
                self.batch_seconds["stored"].add(seconds)

    def add_seconds(self, seconds: float, *, stored: bool) -> None:
        """Count how long a batch took."""
        with self._lock:
            self.batch_seconds["stored" if stored else "failed"].add(seconds)

    def add_refusal(self, code: int) -> None:
        """Count an answer of the contract that was not 1."""
        with self._lock:
            self.refusals[code] = self.refusals.get(code, 0) + 1

    def set_error(self, text: str) -> None:
        """Keep the latest failure."""
        with self._lock:
            self._last_error = text[-_ERROR:]

    @property
    def is_ready(self) -> bool:
        """The process does what it should: owner or standby. Waiting for a person or a change is not ready."""
        with self._lock:
            return is_ready(self._states)

    def report(self) -> Report:
        """Put it all together."""
        with self._lock:
            state = summarize(self._states)
            seen: Observed = {**self._observed, "checkpoints": self._checkpoints()}
            return Report(
                **seen,
                processor_id=self._config.processor_id,
                resource=self._config.resource,
                generation=self._config.generation,
                pod=self._identity.pod,
                pod_uid=self._identity.pod_uid,
                instance=self._identity.instance,
                time=datetime.now(UTC),
                state=state.state,
                reason=state.reason,
                message=state.message[:_MESSAGE],
                claim_holder=self.claim_holder,
                lease=self._lease_view(),
                handled=self.handled,
                batches=self.batches,
                attempt=state.attempt,
                start_from_used=self._start_from_used(),
                last_error=self._last_error,
                circuit=self.circuit() if self.circuit is not None else None,
                executors=self.executors,
                advice="; ".join(filter(None, (self.advice, _name_ignored(self._config)))) or None,
            )

    def _lease_view(self) -> LeaseView | None:
        """Of several partitions: that this process owns some; `leases` says which."""
        states = self._states
        owned = [state for state in states.values() if state.owns]
        if len(states) > 1:
            return LeaseView(pod=self._identity.pod, held=True) if owned else None
        if owned:
            # A consumer in mode Competing has no lease, and works like an owner.
            lease = owned[0].lease
            partition, epoch = (0, 0) if lease is None else (lease.partition, lease.epoch)
            return LeaseView(partition=partition, epoch=epoch, pod=self._identity.pod, held=True)
        pod = self.lease_pod
        return LeaseView(pod=pod) if pod else None

    def _start_from_used(self) -> bool | None:
        known = [state.start_from_used for state in self._states.values() if state.start_from_used is not None]
        return any(known) if known else None

    def _checkpoints(self) -> list[CheckpointView]:
        """What the loop stored is newer than what the heartbeat saw."""
        seen = {view.partition: view for view in self._observed.get("checkpoints", ())}
        for partition, state in self._states.items():
            if state.lease is None or state.stored is None:
                continue
            pair = str(state.stored)
            if partition not in seen or seen[partition].pair != pair:
                seen[partition] = CheckpointView(partition=partition, pair=pair)
        return [seen[partition] for partition in sorted(seen)]


def format_termination(report: Report) -> str:
    """Write the report so that the kubelet keeps all of it: texts are cut before anything else."""
    error = report.last_error or ""
    cuts: list[dict[str, object]] = [
        {"message": report.message[: max(room, 120)], "last_error": error[-room:] or None if room else None}
        for room in (_ERROR, 600, 200, 0)
    ]
    failures = report.failures and report.failures.model_copy(update={"blocked_keys": []})
    unneeded = dict.fromkeys(("rebuild", "high_water_mark", "lag", "advice", "partitioning"))
    cuts.append(unneeded | {"leases": [], "message": report.message[:60], "failures": failures})
    cuts.append({"checkpoints": report.checkpoints[:1]})
    text = ""
    for cut in cuts:
        report = report.model_copy(update=cut)
        text = report.model_dump_json(by_alias=True, exclude_none=True)
        if len(text.encode()) <= TERMINATION_BYTES:
            break
    return text


def write_termination(report: Report, path: Path) -> None:
    """Leave the report where Kubernetes looks for it; outside a pod there is no such file."""
    _leave(format_termination(report).encode(), path)


def write_last_word(text: str, path: Path) -> None:
    """Leave a sentence in place of a report: without a configuration there is nothing to report about."""
    _leave(text.encode()[:TERMINATION_BYTES], path)


def _leave(content: bytes, path: Path) -> None:
    """Write the file if it is there. It is the last thing of many, and what ended the process is not hidden by it."""
    try:
        if path.exists():
            path.write_bytes(content)
    except OSError as err:
        _log.warning(
            "the termination message cannot be written: the operator does not learn why this process ended; free the "
            "node's disk, or let the container write this file",
            extra={"path": str(path), "error": err.strerror},
        )


class Activity:
    """Tells the log every ten seconds what was handled since the last line; nothing handled, nothing told."""

    def __init__(self, status: ProcessStatus, clock: Callable[[], float] = time.monotonic) -> None:
        self._status = status
        self._clock = clock
        self._told = status.handled
        self._since = clock()

    def look(self) -> None:
        """Tell, if it is time. A rest before the first message does not count for the rate."""
        if self._status.handled == self._told:
            self._since = self._clock()
        elif self._clock() - self._since >= ACTIVITY_SECONDS:
            self.tell()

    def tell(self) -> None:
        """Tell what was not told yet."""
        count, now = self._status.handled - self._told, self._clock()
        if not count:
            return
        report, seconds = self._status.report(), max(now - self._since, 0.001)
        _log.info(
            "handled",
            extra=self._status.names
            | {
                "messages": count,
                "perSecond": round(count / seconds, 1),
                "checkpoint": _checkpoints_in_words(report),
                "lag": None if report.lag is None else f"{report.lag.messages}{'+' if report.lag.at_least else ''}",
            },
        )
        self._told, self._since = self._told + count, now


def _checkpoints_in_words(report: Report) -> str | None:
    """Write the checkpoint; of several partitions the first few, each with its number."""
    views = report.checkpoints
    if len(views) <= 1:
        return views[0].pair if views else None
    more = f",+{len(views) - _SHOWN} more" if len(views) > _SHOWN else ""
    return ",".join(f"{view.partition}={view.pair}" for view in views[:_SHOWN]) + more


class Progress:
    """Whether the threads still move: each says before it does something how long that may take."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[str, float] = {}

    def expect(self, thread: str, *, within: float) -> None:
        """Promise to be heard of again within so many seconds."""
        with self._lock:
            self._deadlines[thread] = time.monotonic() + within

    def overdue(self) -> list[str]:
        """Name the threads that broke their promise."""
        now = time.monotonic()
        with self._lock:
            return [name for name, deadline in self._deadlines.items() if now > deadline]


def _name_ignored(config: ProcessorConfig) -> str:
    if not config.ignored:
        return ""
    return f"the pods' image does not know {', '.join(config.ignored)} and ignores it: use the operator's own image"
