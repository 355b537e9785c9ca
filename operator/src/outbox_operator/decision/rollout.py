"""PURE: when pods are replaced because the operator is another version: when it is their turn, or not at all.

A change of the spec is carried out at once. What an upgrade of the operator brings (another image for resources that
name none, other keys) waits for a slot of the budget, and the pods' template stays as the former operator wrote it. A
template that is only written in another way replaces nothing: it waits for the next change (docs/adr/0018). What is
needed to tell these apart is on the workload, so a restarted operator decides the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from outbox_operator.api.observed import Observed, Origin
from outbox_operator.api.reasons import ConditionType

if TYPE_CHECKING:
    from outbox_operator.decision.policies import PolicyResult

WAS_READY: Final = "WasReady"
WAS_NOT_READY: Final = "WasNotReady"
"""Values of the slot: what the processor was before its pods were replaced, and shall be again before others follow."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """Which template the workload has."""

    origin: Origin = field(default_factory=Origin)
    """What the template was rendered for."""
    template: dict[str, Any] | None = None
    """The former one, which stays; None: as the spec and this operator ask for now."""
    slot: str = ""
    """The workload holds a slot of the budget until its pods are replaced; what the processor was before."""
    waits: str = ""
    """Why the former template stays although another is asked for; empty when nothing waits."""


def format_rendered(origin: Origin, template: dict[str, Any]) -> str:
    """Write what a template was rendered for, and the template."""
    return json.dumps({**asdict(origin), "template": template}, sort_keys=True, separators=(",", ":"))


def read_rendered(text: str) -> tuple[Origin, dict[str, Any]]:
    """Read what a template was rendered for, and the template; no spec where another client changed or removed it."""
    try:
        read = json.loads(text)
        return Origin(int(read["generation"]), str(read["spec"]), str(read["installation"])), dict(read["template"])
    except (ValueError, KeyError, TypeError):
        return Origin(), {}


def decide_rollout(observed: Observed, decision: str) -> Rollout:
    """Decide which template the workload shall have, and whether it takes a slot; `decision` is a person's, hashed."""
    workload, asked = observed.workload, observed.origin
    if workload is None or workload.replicas == 0:
        return Rollout(asked)
    if workload.intent_hash == observed.intent_hash:
        return Rollout(asked, slot=workload.slot)
    former, template = read_rendered(workload.rendered)
    same_spec = former.generation == asked.generation or former.spec == asked.spec
    if not same_spec or decision not in ("", workload.decision):
        # A person asks for other pods.
        return Rollout(asked)
    if former.installation == asked.installation:
        return Rollout(asked, template, workload.slot)
    if workload.slot or observed.slots.free:
        return Rollout(asked, slot=workload.slot or _was_ready(observed))
    return Rollout(replace(asked, installation=former.installation), template, waits=_describe(observed))


def _was_ready(observed: Observed) -> str:
    """Say what the processor is before its pods are replaced: as status says, for pods may not have been asked yet.

    Ready with all of its pods, as it shall be again: one that is never ready beside a worker that is would not be.
    """
    true = {each.type for each in observed.previous.conditions if each.status == "True"}
    return WAS_READY if true >= {ConditionType.READY, ConditionType.WORKERS_AVAILABLE} else WAS_NOT_READY


def _describe(observed: Observed) -> str:
    slots = observed.slots
    pace = f"at most {slots.limit} at a time are" if slots.limit else "none is"
    stuck = f". {slots.failing}: correct what it names, or roll the operator back" if slots.failing else ""
    return (
        f"the operator was upgraded; the present pods work on until it is this processor's turn to get new ones with "
        f"image {observed.image}: of all processors {pace} replaced (chart value rollout.maxConcurrent){stuck}"
    )


def as_in_force(observed: Observed, rollout: Rollout) -> Observed:
    """Replace what is asked for by what the workload shall have: pods of a template that stays are not outdated."""
    workload = observed.workload
    if rollout.template is None or workload is None:
        return observed
    return replace(observed, intent_hash=workload.intent_hash)


def settle(rollout: Rollout, observed: Observed, result: PolicyResult, replicas: int) -> Rollout:
    """Give the slot back when nothing runs, or when the pods were replaced and the processor is what it was before."""
    if replicas == 0:
        return Rollout(observed.origin)
    if not rollout.slot:
        return rollout
    pods = observed.runners
    replaced = len(pods) == replicas and not any(p.deleting or p.intent_hash != observed.intent_hash for p in pods)
    if rollout.slot == WAS_READY:
        done = replaced and result.ready and all(pod.ready for pod in pods)
    else:
        # What kept it from being ready before may keep it so now: that must not hold up the others.
        done = replaced and all(pod.phase == "Running" for pod in pods)
    return replace(rollout, slot="") if done else rollout
