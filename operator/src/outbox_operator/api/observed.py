"""What one reconcile knows: frozen values, filled in by `observe.py`, judged by `decide.py`. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from outbox_core.plain import plain_count
from outbox_core.report import Report, WorkerState
from outbox_operator.api.status import ProcessorStatus

if TYPE_CHECKING:
    from datetime import datetime

    from outbox_operator.api.resources import Processor


class Role(StrEnum):
    """What a pod of ours is for; the value of its role label."""

    WORKER = "worker"
    DRIVER = "driver"
    EXECUTOR = "executor"
    CLAIM = "claim"
    HAND_OVER = "hand-over"
    RELEASE = "release"


RUNNERS = frozenset({Role.WORKER, Role.DRIVER})
"""Pods that handle messages and answer at /status."""

OWNING_STATES = frozenset(
    {WorkerState.ACTIVE, WorkerState.STANDBY, WorkerState.RETRYING, WorkerState.STOPPED, WorkerState.BLOCKED}
)
"""States in which the worker has been granted the claim."""

UNINFORMED_STATES = frozenset({WorkerState.STARTING, WorkerState.UNAVAILABLE, WorkerState.CLAIM_REFUSED})
"""States in which the worker may not have read its conflicts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a pod does not run, in Kubernetes' own words."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod, and the last that its process said."""

    name: str
    role: Role
    ip: str | None = None
    phase: str = "Pending"
    ready: bool = False
    deleting: bool = False
    intent_hash: str = ""
    """Of the pod template that it was made from."""
    decision: str = ""
    """Hash of the person's decision that it was started with."""
    job: str = ""
    problem: Problem | None = None
    report: Report | None = None
    """The latest answer of /status."""
    reachable: bool = False
    """Whether the latest question was answered."""
    unreachable_message: str = ""
    """Why its process is not heard, and what to do, once that is worth telling."""
    last_words: Report | None = None
    """The report that its last ended container left."""
    exit_code: int | None = None

    @property
    def alive(self) -> bool:
        """Its process may still do something."""
        return self.phase not in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class Origin:
    """What a pod template was rendered for: what of it is another tells who asks for other pods."""

    generation: int = 0
    """Of the resource."""
    spec: str = ""
    """Hash of all in the spec but what changes no pod (`suspend`, `handOverTo`, the number of replicas)."""
    installation: str = ""
    """Hash of what comes with the operator: the image of resources that name none, keys, clusterId."""


@dataclass(frozen=True, slots=True)
class Slots:
    """How many processors an upgrade of the operator may replace the pods of at a time, as one of them sees it."""

    limit: int = 1
    free: bool = True
    """There is one for this processor now."""
    failing: str = ""
    """The first of those that have one and do not become Ready again, with its own words."""


@dataclass(frozen=True, slots=True)
class WorkloadView:
    """The Deployment or StatefulSet as the API server has it."""

    replicas: int
    intent_hash: str
    decision: str = ""
    """Hash of the latest decision of a person that pods were started with."""
    problem: Problem | None = None
    slot: str = ""
    """An upgrade of the operator replaces its pods; in what condition the processor was before (`rollout.py`)."""
    rendered: str = ""
    """What its template was rendered for, and the template as it was rendered."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A short-lived job of ours."""

    name: str
    finished: bool
    succeeded: bool


@dataclass(frozen=True, slots=True)
class Sibling:
    """Another resource of this cluster with the same processorId."""

    namespace: str
    name: str
    created: datetime
    granted: bool
    handed_over_to: str | None = None
    """cluster/namespace/name, once it has done so."""
    handed_over_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that a decision may rest on."""

    processor: Processor
    created: datetime
    previous: ProcessorStatus = field(default_factory=ProcessorStatus)
    workload: WorkloadView | None = None
    intent_hash: str = ""
    """Of the pod template that the spec asks for now."""
    origin: Origin = field(default_factory=Origin)
    """What that pod template is rendered for."""
    image: str = ""
    """The image that it names."""
    slots: Slots = field(default_factory=Slots)
    pods: tuple[PodView, ...] = ()
    jobs: tuple[JobView, ...] = ()
    siblings: tuple[Sibling, ...] = ()
    foreign: tuple[str, ...] = ()
    """Pods that carry the resource's labels and were not made for it: neither asked, nor counted, nor believed."""
    unsettled: datetime | None = None
    """When the youngest pod was made of which time tells more, without a change: Events, or that nothing owns it."""
    holder_gone: bool = False
    """The resource that holds the claim, as last heard, is known not to exist any more."""
    successor_missing: bool = False
    """spec.handOverTo names what is certainly no resource of this cluster that asks for the same processorId."""
    obstacle: Problem | None = None
    """Why an owned object cannot be made (a name taken, a quota)."""

    @property
    def runners(self) -> tuple[PodView, ...]:
        """Pods whose process may still handle messages."""
        return tuple(pod for pod in self.pods if pod.role in RUNNERS and pod.alive)

    @property
    def problem(self) -> Problem | None:
        """Why pods do not run: the first pod's problem, else the workload's."""
        problems = (pod.problem for pod in self.runners if pod.problem is not None and not pod.deleting)
        return next(problems, self.workload.problem if self.workload is not None else None)

    @property
    def outdated(self) -> str:
        """How many pods have another template, in words; empty: none.

        Those that answer and are not believed do not count: such a one holds nothing up.
        """
        former = [pod for pod in self.runners if pod.intent_hash != self.intent_hash]
        waited_for = sum(pod.report is not None or not pod.unreachable_message for pod in former)
        return (
            f"still to be replaced: {plain_count(waited_for, 'pod')} of the former spec or version"
            if waited_for
            else ""
        )

    @property
    def unreachable(self) -> str:
        """Why a running process of the present template is not heard, and how many more; older ones are replaced."""
        current = [pod for pod in self.runners if pod.intent_hash == self.intent_hash and not pod.deleting]
        said = [pod.unreachable_message for pod in current if pod.phase == "Running" and pod.unreachable_message]
        more = plain_count(len(said) - 1, "more pod is", "more pods are")
        return f"{said[0]}; {more} not heard" if len(said) > 1 else "".join(said)

    @property
    def reports(self) -> tuple[Report, ...]:
        """Live reports of this very resource's processes, newest first."""
        uid = self.processor.uid
        found = [
            pod.report
            for pod in self.runners
            if pod.report is not None and pod.reachable and not pod.deleting and pod.report.resource.uid == uid
        ]
        return tuple(sorted(found, key=lambda report: report.time, reverse=True))

    @property
    def last_words(self) -> tuple[Report, ...]:
        """Reports of ended processes and of pods that are going, newest first."""
        uid = self.processor.uid
        found = [pod.last_words for pod in self.pods if pod.last_words is not None]
        found += [pod.report for pod in self.pods if pod.report is not None and (pod.deleting or not pod.reachable)]
        return tuple(sorted((r for r in found if r.resource.uid == uid), key=lambda r: r.time, reverse=True))
