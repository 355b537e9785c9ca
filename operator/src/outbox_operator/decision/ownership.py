"""PURE: whether the claim on the processorId is this resource's, as workers and tries say, and when it is tried again.

`now` is the operator's clock and only paces tries; who owns what is the database's word, carried in the reports.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from outbox_core.report import ExitCode, ResourceRef, WorkerState
from outbox_operator.api.naming import child_name
from outbox_operator.api.observed import OWNING_STATES, Observed, Role
from outbox_operator.api.status import OwnershipStatus

FIRST_TRY: Final = timedelta(seconds=10)
LONGEST_TRY: Final = timedelta(minutes=5)
SPREAD: Final = 0.1
"""Part of a wait by which it may be longer, so that many do not try in step."""
LONGEST_ASKING: Final = timedelta(seconds=20)
"""Between tries that no database has answered yet: nothing says that the claim is another resource's."""
QUICK_TRY: Final = timedelta(seconds=3)
"""Least time between two tries when the owner is known to be gone."""


class OwnershipState:
    """Values of status.ownership.state."""

    UNKNOWN: Final = "Unknown"
    GRANTED: Final = "Granted"
    TRYING: Final = "Trying"
    """A known duplicate: the database is asked before anything runs. What is known of others is a hint, no more."""
    REFUSED: Final = "Refused"
    HANDED_OVER: Final = "HandedOver"


def merge_ownership(observed: Observed, now: datetime) -> OwnershipStatus:
    """Say whether the claim is ours, and when it is tried again while it is not."""
    previous = _by_this_clock(observed.previous.ownership, now)
    if observed.processor.spec.hand_over_to is None and previous.state == OwnershipState.HANDED_OVER:
        previous = previous.model_copy(update={"state": OwnershipState.REFUSED, "attempts": 0, "next_try": now})
    heard = _read_claim(observed)
    if heard is None:
        tried = _after_try(observed, previous, now)
        return tried or _hurry(observed, _consider_siblings(observed, previous, now), now)
    granted, holder = heard
    if granted and previous.state != OwnershipState.REFUSED:
        return OwnershipStatus(state=OwnershipState.GRANTED, tries=previous.tries)
    if previous.state == OwnershipState.REFUSED:
        # Workers are being stopped. One that says it owns has not noticed yet: only a try finds that the claim is ours.
        return _hurry(observed, previous.model_copy(update={"holder": holder or previous.holder}), now)
    return OwnershipStatus(
        state=OwnershipState.REFUSED, holder=holder, tries=previous.tries, last_try=now, next_try=now + FIRST_TRY
    )


def _by_this_clock(ownership: OwnershipStatus, now: datetime) -> OwnershipStatus:
    """Bound what another process has planned, whose clock may have been ahead: no wait is longer than the longest."""
    last, planned = ownership.last_try, ownership.next_try
    return ownership.model_copy(
        update={
            "last_try": last and min(last, now),
            "next_try": planned and min(planned, now + LONGEST_TRY * (1 + SPREAD)),
        }
    )


def _read_claim(observed: Observed) -> tuple[bool, ResourceRef | None] | None:
    """What running workers say about the claim: (ours, holder); None when none knows."""
    for report in observed.reports:
        holder = report.claim_holder
        if report.state is WorkerState.CLAIM_REFUSED:
            return False, holder
        if report.state in OWNING_STATES or (holder is not None and holder.uid == observed.processor.uid):
            return True, None
    return None


def _consider_siblings(observed: Observed, previous: OwnershipStatus, now: datetime) -> OwnershipStatus:
    """A new resource whose processorId an older one of this cluster owns starts with a try, not with workers.

    It may be another database, and both are right: the try says so. When no such resource is left, nothing is asked.
    """
    rivals = any(s.granted and s.created <= observed.created for s in observed.siblings)
    if previous.state == OwnershipState.TRYING and not rivals:
        # Another number: what became of the try that may be under way does not matter any more.
        return previous.model_copy(
            update={"state": OwnershipState.UNKNOWN, "next_try": None, "tries": previous.tries + 1, "problem": None}
        )
    if previous.state != OwnershipState.UNKNOWN or observed.runners or not rivals:
        return previous
    return previous.model_copy(update={"state": OwnershipState.TRYING, "next_try": now})


def _hurry(observed: Observed, ownership: OwnershipStatus, now: datetime) -> OwnershipStatus:
    """Bring the next try forward when the holder is known to be gone, or has handed over to us."""
    if ownership.state != OwnershipState.REFUSED:
        return ownership
    last = ownership.last_try
    given = [s.handed_over_at for s in observed.siblings if s.handed_over_to == str(observed.processor.ref)]
    offered = any(at is not None and (last is None or last <= at) for at in given)
    if not (observed.holder_gone or offered):
        return ownership
    soonest = now if last is None else max(now, last + QUICK_TRY)
    planned = ownership.next_try
    return ownership.model_copy(update={"next_try": soonest if planned is None else min(planned, soonest)})


def claim_job_name(name: str, tries: int) -> str:
    """Name the job of one try; the number, never used again, keeps two tries apart."""
    return child_name(name, f"claim-{tries}")


def _after_try(observed: Observed, previous: OwnershipStatus, now: datetime) -> OwnershipStatus | None:
    """Say what the latest try found; None while it has not ended."""
    name = claim_job_name(observed.processor.name, previous.tries)
    job = next((job for job in observed.jobs if job.name == name and job.finished), None)
    if job is None or previous.state not in (OwnershipState.REFUSED, OwnershipState.TRYING):
        return None
    if job.succeeded:
        return OwnershipStatus(state=OwnershipState.GRANTED, tries=previous.tries + 1, last_try=now)
    pod = next((pod for pod in observed.pods if pod.role is Role.CLAIM and pod.job == name), None)
    words = pod.last_words if pod is not None else None
    holder, state = previous.holder, previous.state
    if pod is not None and pod.exit_code == ExitCode.CLAIM_HELD and words is not None:
        holder, state = words.claim_holder or holder, OwnershipState.REFUSED
    unasked = words if words is not None and words.state is WorkerState.UNAVAILABLE else None
    attempts = previous.attempts + 1
    wait = _next_try_after(attempts, observed.processor.uid)
    return OwnershipStatus(
        state=state,
        holder=holder,
        attempts=attempts,
        tries=previous.tries + 1,
        last_try=now,
        next_try=now + (min(wait, LONGEST_ASKING) if state == OwnershipState.TRYING else wait),
        problem=unasked.reason if unasked is not None else None,
        problem_message=unasked.message if unasked is not None else None,
    )


def _next_try_after(attempts: int, uid: str) -> timedelta:
    """Wait between tries: 10 s doubled up to 5 min, and spread."""
    doublings: int = 1 << min(max(attempts - 1, 0), 10)
    return min(FIRST_TRY * doublings, LONGEST_TRY) * (1 + SPREAD * (sum(uid.encode()) % 100) / 100)
