"""What `outbox status` makes of the processes' last statuses. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_cli.console import record_of
from outbox_core.processor.summary import TELLING
from outbox_core.report import WorkerState
from outbox_core.span import format_age

if TYPE_CHECKING:
    from collections.abc import Iterable

    from outbox_cli.console import Record
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.ownership.process_statuses import StoredStatus

TROUBLED: Final = frozenset({"Stopped", "Retrying", "Unavailable", "Blocked"})
"""States of a process that are the processor's state too."""
_ORDER: Final = {state.value: number for number, state in enumerate(TELLING)}


def choose_status(view: ProcessorView, statuses: Iterable[StoredStatus]) -> StoredStatus | None:
    """Return the status that says how the partition is; None: no process ever said anything.

    That of the process that has the lease; without one, of the processes that live the one that most needs attention;
    else the latest of all.
    """
    said = [each for each in statuses if (each.processor_id, each.partition) == (view.processor_id, view.partition)]
    if view.live and view.token is not None:
        return next((each for each in said if each.token == view.token), None)
    fresh = [each for each in said if each.is_fresh]
    if fresh:
        return min(fresh, key=lambda each: _ORDER.get(each.state, len(_ORDER)))
    return min(said, key=lambda each: each.age_seconds, default=None)


def name_of(view: ProcessorView) -> str:
    """Name a processor's partition; the first one, which may be all of it, by the processor alone."""
    return view.processor_id if not view.partition else f"{view.processor_id} partition {view.partition}"


def state_of(view: ProcessorView, status: StoredStatus | None = None) -> str:
    """One word for people: Blocked, Stopped, Retrying, Unavailable, Running, Vacated, Claimed or Free."""
    if view.open_conflict is not None:
        return "Blocked"
    told = status.state if status is not None and status.is_fresh and status.state in TROUBLED else None
    if view.live:
        return told or "Running"
    if view.holder is None:
        return "Free"
    return told or ("Claimed" if view.vacated_at is None else "Vacated")


def process_record(status: StoredStatus | None) -> Record | None:
    """Write a process's status for a program."""
    if status is None:
        return None
    return record_of(status, but=("processor_id", "partition", "token", "is_fresh")) | {"fresh": status.is_fresh}


def format_reason(status: StoredStatus | None) -> str | None:
    """Write the reason for a table: an old one says how old it is."""
    if status is None or status.is_fresh:
        return None if status is None else status.reason
    return f"{status.reason}, {'ended' if status.ended else 'silent'} {format_age(status.age_seconds)}"


def describe_status(view: ProcessorView, status: StoredStatus | None) -> str | None:
    """Write a sentence where a person should read one; None: all goes on."""
    if status is None:
        return None
    name = name_of(view)
    message = f": {status.message}" if status.message else ""
    if status.is_fresh:
        return f"{name}: {status.state} ({status.reason}){message}" if status.state in TROUBLED else None
    age = format_age(status.age_seconds)
    state = "Running" if status.state == WorkerState.ACTIVE else status.state
    if status.ended:
        if status.state not in TROUBLED:
            return None
        return f"{name}: pod {status.pod} ended {age} ago; before that it was {state} ({status.reason}){message}"
    return (
        f"{name}: nothing was heard of pod {status.pod} for {age}: it was killed, is frozen, or cannot reach this "
        f"database; it last said {state} ({status.reason}){message}"
    )
