"""PURE: what a process with several partitions says of itself, where a reader expects one state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_core.processor.state import Step
from outbox_core.report import Reason, WorkerState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_core.processor.state import ProcessorState

TELLING: Final = (
    WorkerState.BLOCKED,
    WorkerState.STOPPED,
    WorkerState.RETRYING,
    WorkerState.UNAVAILABLE,
    WorkerState.CLAIM_REFUSED,
    WorkerState.DRAINING,
    WorkerState.ACTIVE,
    WorkerState.STARTING,
    WorkerState.STANDBY,
)
"""The state that most needs attention comes first."""

_READY: Final = frozenset({WorkerState.ACTIVE, WorkerState.STANDBY, WorkerState.RETRYING})


def summarize(states: Mapping[int, ProcessorState]) -> ProcessorState:
    """Return the state of the partition that most needs attention, its number in front of the message.

    A process with one partition is that partition. Busy anywhere is busy.
    """
    if len(states) == 1:
        return next(iter(states.values()))
    partition, state = min(states.items(), key=lambda item: (TELLING.index(item[1].state), item[0]))
    if state.state is WorkerState.ACTIVE:
        busy = any(each.reason is Reason.RUNNING for each in states.values())
        return state._replace(reason=Reason.RUNNING if busy else Reason.IDLE)
    if state.state is WorkerState.STANDBY:
        return state._replace(message="other replicas own all partitions")
    alike = [number for number, each in states.items() if (each.state, each.message) == (state.state, state.message)]
    if len(alike) > 1 or not state.message:
        return state
    return state._replace(message=f"partition {partition}: {state.message}")


def is_ready(states: Mapping[int, ProcessorState]) -> bool:
    """Say whether the process does what it should: owner or standby.

    Waiting for a person or a change is not ready, unless another partition of this process goes on meanwhile.
    """
    working = [state for state in states.values() if state.step is not Step.PARK] or list(states.values())
    return any(state.state in _READY for state in working)
