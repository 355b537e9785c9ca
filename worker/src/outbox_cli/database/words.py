"""What `outbox status` makes of the processes' last words. Pure."""

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
    from outbox_worker.postgres.ownership.words import SaidWord

TROUBLED: Final = frozenset({"Stopped", "Retrying", "Unavailable", "Blocked"})
"""States of a process that are the processor's state too."""
_ORDER: Final = {state.value: number for number, state in enumerate(TELLING)}


def choose_word(view: ProcessorView, words: Iterable[SaidWord]) -> SaidWord | None:
    """Return the word that says how the partition is; None: no process ever said anything.

    That of the process that has the lease; without one, of the processes that live the one that most needs attention;
    else the latest of all.
    """
    said = [each for each in words if (each.processor_id, each.partition) == (view.processor_id, view.partition)]
    if view.live and view.token is not None:
        return next((each for each in said if each.token == view.token), None)
    fresh = [each for each in said if each.is_fresh]
    if fresh:
        return min(fresh, key=lambda each: _ORDER.get(each.state, len(_ORDER)))
    return min(said, key=lambda each: each.age_seconds, default=None)


def name_of(view: ProcessorView) -> str:
    """Name a processor's partition; the first one, which may be all of it, by the processor alone."""
    return view.processor_id if not view.partition else f"{view.processor_id} partition {view.partition}"


def state_of(view: ProcessorView, word: SaidWord | None = None) -> str:
    """One word for people: Blocked, Stopped, Retrying, Unavailable, Running, Vacated, Claimed or Free."""
    if view.open_conflict is not None:
        return "Blocked"
    told = word.state if word is not None and word.is_fresh and word.state in TROUBLED else None
    if view.live:
        return told or "Running"
    if view.holder is None:
        return "Free"
    return told or ("Claimed" if view.vacated_at is None else "Vacated")


def word_record(word: SaidWord | None) -> Record | None:
    """Write a word for a program."""
    if word is None:
        return None
    return record_of(word, but=("processor_id", "partition", "token", "is_fresh")) | {"fresh": word.is_fresh}


def format_reason(word: SaidWord | None) -> str | None:
    """Write the reason for a table: an old one says how old it is."""
    if word is None or word.is_fresh:
        return None if word is None else word.reason
    return f"{word.reason}, {'ended' if word.ended else 'silent'} {format_age(word.age_seconds)}"


def describe_word(view: ProcessorView, word: SaidWord | None) -> str | None:
    """Write a sentence where a person should read one; None: all goes on."""
    if word is None:
        return None
    name = name_of(view)
    message = f": {word.message}" if word.message else ""
    if word.is_fresh:
        return f"{name}: {word.state} ({word.reason}){message}" if word.state in TROUBLED else None
    age = format_age(word.age_seconds)
    state = "Running" if word.state == WorkerState.ACTIVE else word.state
    if word.ended:
        if word.state not in TROUBLED:
            return None
        return f"{name}: pod {word.pod} ended {age} ago; before that it was {state} ({word.reason}){message}"
    return (
        f"{name}: nothing was heard of pod {word.pod} for {age}: it was killed, is frozen, or cannot reach this "
        f"database; it last said {state} ({word.reason}){message}"
    )
