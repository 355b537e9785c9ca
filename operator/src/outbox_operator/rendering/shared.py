"""PURE: renders what several resources share: one Deployment, one ConfigMap with a file for each, one key.

Which resources a pod runs is on the pod itself, with the hashes that tell for each of them whether it is the pod that
its spec asks for: so each resource looks at a shared pod as at one of its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox_operator.api.naming import MEMBERS_ANNOTATION, build_object, labels_of, refer_to, shared_id, shared_name
from outbox_operator.api.observed import Problem
from outbox_operator.api.reasons import Reason
from outbox_operator.rendering.manifests import (
    build_budget,
    build_config,
    build_deployment,
    build_key_secret,
    dump_config,
    format_config,
    hash_of,
    stamped,
)
from outbox_operator.rendering.pods import build_shared_pod, secrets_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime

    from outbox_core.config import Resolution
    from outbox_operator.api.keys import Keys
    from outbox_operator.api.resources import Processor
    from outbox_operator.settings import Images


@dataclass(frozen=True, slots=True)
class Member:
    """What a resource wants in the pods that it shares; with 0 replicas it is left out of them."""

    processor: Processor
    replicas: int
    resolution: Resolution | None = None
    sweep_uids: tuple[str, ...] = ()
    decision: str = ""
    """Hash of a person's decision about a conflict, the present one or the last."""
    created: datetime = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class Part:
    """What a shared pod was made for, of one resource: its uid, and the hashes of its configuration and decision."""

    uid: str
    template: str
    decision: str = ""


def hash_member(processor: Processor, images: Images) -> str:
    """Hash what of a resource replaces pods, as `build_template` does for pods of its own; another group has others."""
    return hash_of([processor.spec.worker.shared, images.worker, images.user, dump_config(processor, images)])


def format_parts(members: Sequence[Member], images: Images) -> str:
    """Write which resources a pod runs."""
    parts = {
        each.processor.name: [each.processor.uid, hash_member(each.processor, images), each.decision]
        for each in members
    }
    return json.dumps(parts, sort_keys=True, separators=(",", ":"))


def read_parts(metadata: Mapping[str, Any]) -> dict[str, Part]:
    """Read which resources a pod runs, by name; none where another client changed that."""
    try:
        found = json.loads((metadata.get("annotations") or {}).get(MEMBERS_ANNOTATION, "{}"))
        return {str(name): Part(*map(str, part)) for name, part in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def runs_what_left(pods: Iterable[Mapping[str, Any]], members: Sequence[Member]) -> bool:
    """Say whether one of the pods runs a resource that shall not run: suspended, deleted, or refused its claim.

    Such a pod must not wait until another one is ready: that may take long, or never come.
    """
    wanted = {(each.processor.name, each.processor.uid) for each in members if each.replicas}
    running = {(name, part.uid) for pod in pods for name, part in read_parts(pod["metadata"]).items()}
    return not running <= wanted


def find_misfits(members: Sequence[Member]) -> dict[str, Problem]:
    """Say by name which resources cannot run with the others: those of another source than the oldest.

    The oldest, for a new resource must not stop those that run.
    """
    if not members:
        return {}
    oldest = min(members, key=lambda each: (each.created, each.processor.name)).processor
    secret, group = _source_of(oldest), oldest.spec.worker.shared
    return {
        each.processor.name: Problem(
            Reason.INVALID_SPEC,
            f"source.connection names Secret {_source_of(each.processor)!r}, and the pods of worker.shared {group!r} "
            f"read Secret {secret!r}, which the oldest of their resources, {oldest.name!r}, names: name that one, or "
            "share another name",
        )
        for each in members
        if _source_of(each.processor) != secret
    }


def _source_of(processor: Processor) -> str:
    return processor.spec.source.connection.secret_ref.name


def build_shared(
    group: tuple[str, str], members: Sequence[Member], images: Images, *, at_once: bool = False
) -> list[dict[str, Any]]:
    """Build what a group has, in the order in which it is made, the Deployment last; nothing for no resource.

    It goes when the last of the resources goes. `at_once`: pods that are not as they should be end before others begin,
    as `runs_what_left` says; else one ends, another one is ready, and then the next one ends.
    """
    if not members:
        return []
    metadata = _build_meta(group, members)
    running = [each for each in members if each.replicas]
    secrets = sorted({secret for each in running for secret in secrets_of(each.processor).values()})
    template = build_shared_pod(*group, secrets, images)
    template["metadata"]["annotations"] = {MEMBERS_ANNOTATION: format_parts(running, images)}
    files = {
        f"{each.processor.name}.json": format_config(
            build_config(each.processor, images, each.resolution, each.sweep_uids)
        )
        for each in running
    }
    replicas = max((each.replicas for each in running), default=0)
    budgets = [build_budget(metadata, group[1])] if images.budgets and replicas > 1 else []
    deployment = build_deployment(metadata, group[1], replicas, template, at_once=at_once)
    return [stamped(each) for each in (build_object("ConfigMap", metadata, data=files), *budgets, deployment)]


def build_shared_key(group: tuple[str, str], deployment_uid: str, keys: Keys) -> dict[str, Any]:
    """Build the Secret with the key of the shared pods, which goes with the Deployment.

    Its owners could not be the resources: they come and go.
    """
    name, of = shared_name(group[1]), shared_id(*group)
    owner = {"apiVersion": "apps/v1", "kind": "Deployment", "name": name, "uid": deployment_uid}
    meta = _build_meta(group, ()) | {"name": keys.secret_name(name, of), "ownerReferences": [owner]}
    return build_key_secret(meta, keys.of(of))


def _build_meta(group: tuple[str, str], members: Sequence[Member]) -> dict[str, Any]:
    return {
        "name": shared_name(group[1]),
        "namespace": group[0],
        "labels": labels_of(group[1]),
        "ownerReferences": [{**refer_to(each.processor), "blockOwnerDeletion": False} for each in members],
    }
