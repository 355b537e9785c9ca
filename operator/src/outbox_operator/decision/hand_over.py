"""PURE: the steps of `spec.handOverTo`: drain, transfer, done. Each is read off the cluster, so none can be lost.

The claim is given away by a job of the worker image, after the last pod is gone. Run twice it does no harm: the second
finds the claim in the new owner's name. Nothing is drained while the new owner is not there: no other resource
could ever claim the processor again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final

from outbox_operator.api.naming import child_name
from outbox_operator.api.observed import Observed, Role
from outbox_operator.api.status import HandOverStatus

if TYPE_CHECKING:
    from datetime import datetime

    from outbox_operator.api.resources import Processor


class HandOverStep:
    """Values of status.handOver.step."""

    WAITING: Final = "Waiting"
    """For the new owner to be made; pods go on."""
    DRAINING: Final = "Draining"
    TRANSFERRING: Final = "Transferring"
    DONE: Final = "Done"
    FAILED: Final = "Failed"


def hand_over_job_name(processor: Processor) -> str:
    """Name the transfer's job; another target, or a corrected spec, is another job."""
    text = f"{processor.successor}@{processor.generation}"
    return child_name(processor.name, f"give-{hashlib.sha256(text.encode()).hexdigest()[:5]}")


def build_hand_over(observed: Observed, now: datetime) -> HandOverStatus | None:
    """Say how far the hand-over is; None when none is asked for."""
    if observed.processor.successor is None:
        return None
    target = str(observed.processor.successor)
    previous = observed.previous.hand_over
    if previous is not None and previous.to == target and previous.step == HandOverStep.DONE:
        return previous
    step, message = _step(observed, target)
    if previous is not None and (previous.to, previous.step, previous.message) == (target, step, message):
        return previous
    return HandOverStatus(to=target, step=step, time=now, message=message)


def _step(observed: Observed, target: str) -> tuple[str, str]:
    name = hand_over_job_name(observed.processor)
    job = next((job for job in observed.jobs if job.name == name), None)
    if job is None and observed.successor_missing:
        message = (
            f"there is no other OutboxProcessor {target} with processorId {observed.processor.processor_id!r}: create "
            "it, or correct spec.handOverTo or take it out; nothing is handed over until then"
        )
        return HandOverStep.WAITING, message
    if observed.runners:
        return HandOverStep.DRAINING, ""
    if job is None or not job.finished:
        return HandOverStep.TRANSFERRING, ""
    if job.succeeded:
        return HandOverStep.DONE, ""
    pod = next((pod for pod in observed.pods if pod.role is Role.HAND_OVER and pod.job == name), None)
    words = pod.last_words.message if pod is not None and pod.last_words is not None else "the job left no word"
    return (
        HandOverStep.FAILED,
        f"the claim could not be given to {target}: {words}; change spec.handOverTo to try again",
    )
