"""`status`, `pause`, `resume`, `accept` and `rewind` against a cluster: by the resource's fields and annotations only.

What is asked here is carried out by the operator and its workers; `--wait` waits until they say that it is done.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from outbox_cli.cluster.serving import decide_service, fetch_operators, serving
from outbox_cli.console import Console, Record, format_fields
from outbox_cli.errors import INSTALL, AwayError, CommandError, Exit, RefusedError, UsageError
from outbox_operator.api.resources import ACCEPT_ANNOTATION, REWIND_ANNOTATION

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_cli.cluster.client import Cluster
    from outbox_cli.context import Context
    from outbox_core.progress.checkpoint import Checkpoint

Body = dict[str, Any]
POLL_SECONDS: Final = 0.5
_COLUMNS: Final = {
    "NAMESPACE": "namespace", "NAME": "name", "ENGINE": "engine", "MODE": "mode", "PHASE": "phase", "OWNER": "owner",
    "CHECKPOINT": "checkpoint", "LAG": "lagText", "CONFLICTS": "conflicts", "OPEN": "openConflict", "READY": "ready",
}  # fmt: skip

_FLOW: Final = ("SourceCurrent", "MessagesFlow")
"""Conditions that tell of messages that wait, also where `Ready` is true."""


def open_cluster(context: Context) -> Cluster:
    """Reach the cluster that the command names."""
    try:
        from outbox_cli.cluster.client import Cluster  # needs a package that a worker's image has not
    except ImportError as err:
        raise CommandError(f"this needs the package kubernetes: {INSTALL}") from err
    options = context.options
    return Cluster(options.kubeconfig, options.context, options.namespace)


def resource_record(body: Body) -> Record:
    """Write a resource for a person or a program: what its status says."""
    status = body.get("status") or {}
    conflicts = status.get("conflicts") or {}
    ready = condition(body, "Ready")
    return {
        "namespace": body["metadata"].get("namespace"),
        "name": body["metadata"]["name"],
        "processorId": body["spec"].get("processorId") or body["metadata"]["name"],
        "engine": body["spec"].get("engine", "Worker"),
        "mode": status.get("mode"),
        "suspended": bool(body["spec"].get("suspend")),
        "phase": status.get("phase"),
        "ready": ready.get("reason") if ready.get("status") == "True" else f"no: {ready.get('reason', 'unknown')}",
        "message": ready.get("message"),
        "owner": (status.get("owner") or {}).get("pod"),
        "epoch": (status.get("owner") or {}).get("epoch"),
        "checkpoint": (status.get("checkpoint") or {}).get("pair"),
        "lag": status.get("lag"),
        "highWaterMark": status.get("highWaterMark"),
        "conflicts": conflicts.get("count", 0),
        "openConflict": conflicts.get("open"),
        "conditions": status.get("conditions") or [],
    }


def condition(body: Body, kind: str) -> Body:
    """Return one condition; empty while none is known about the current generation."""
    for found in (body.get("status") or {}).get("conditions") or ():
        if found["type"] == kind and found.get("observedGeneration", 0) >= body["metadata"].get("generation", 0):
            answer: Body = found
            return answer
    return {}


def status(context: Context) -> Exit:
    """List the processors of a namespace or of all, or show one with its conditions."""
    cluster, options, console = open_cluster(context), context.options, context.console
    if options.processor is not None and options.all_namespaces:
        raise UsageError(f"-A means every namespace: say which one's {options.processor}, with -n NAMESPACE")
    if options.processor is None:
        records = _told_of_service(cluster, console, cluster.list(everywhere=options.all_namespaces))
        shown = records if console.is_json else [shorten_record(record) for record in records]
        return console.show(shown, _COLUMNS, empty="there is no OutboxProcessor")
    (record,) = _told_of_service(cluster, console, [cluster.get(options.processor)])
    fields = {name: value for name, value in shorten_record(record).items() if name not in ("conditions", "message")}
    conditions = (
        f"  {found['type']}={found['status']} {found['reason']}: {found.get('message', '')}"
        for found in record["conditions"]
    )
    return console.tell(record, *format_fields(fields), *conditions)


def _told_of_service(cluster: Cluster, console: Console, bodies: list[Body]) -> list[Record]:
    """Write resources, with the operators that serve each; say beside them what is wrong with that."""
    if not bodies:
        return []
    operators = fetch_operators(cluster)
    looked_at: dict[str, bool] = {}
    for body in bodies:
        namespace = body["metadata"]["namespace"]
        looked_at[namespace] = looked_at.get(namespace, True) and is_looked_at(body)
    wrong = (decide_service(operators, name, looked_at=seen) for name, seen in sorted(looked_at.items()))
    for sentence in dict.fromkeys(filter(None, wrong)):
        console.note(sentence)
    return [_with_service(body, serving(operators, body["metadata"]["namespace"])) for body in bodies]


def _with_service(body: Body, served: list[str] | None) -> Record:
    """Write a resource with the operators that serve it; where none does and none did, that is why it is not ready."""
    record = resource_record(body) | {"servedBy": served}
    return record | {"ready": "no: NotServed"} if served == [] and not is_looked_at(body) else record


def is_looked_at(body: Body) -> bool:
    """Tell whether an operator has written a status about the present spec."""
    return bool((body.get("status") or {}).get("observedGeneration", 0) >= body["metadata"].get("generation", 0))


def shorten_record(record: Record) -> Record:
    """Put objects into words; of a resource that is ready say what waits all the same."""
    opened, mark = record["openConflict"], record["highWaterMark"] or {}
    short = {name: value for name, value in record.items() if name != "lag"}
    waits = [each["reason"] for each in record["conditions"] if each["type"] in _FLOW and each["status"] == "False"]
    if waits and not str(record["ready"]).startswith("no: "):
        short["ready"] = f"{record['ready']}, but {', '.join(waits)}"
    return short | {
        "lagText": (record["lag"] or {}).get("text"),
        "highWaterMark": mark.get("holder") or mark.get("transactionId"),
        "openConflict": None if opened is None else opened["id"],
    }


def suspend(context: Context, *, suspend: bool) -> Exit:
    """Set spec.suspend (the batch is finished or rolled back, checkpoint and claim are kept), or take it away."""
    cluster, name, console = open_cluster(context), context.options.processor, context.console
    body = cluster.patch(name, {"spec": {"suspend": suspend}})
    if context.options.wait:
        body = wait_for(
            console, cluster, body, "suspended" if suspend else "ready",
            partial(is_ready, reason="Suspended" if suspend else "Running"), context.options.timeout,
        )  # fmt: skip
    done = "is suspended" if suspend else "runs"
    asked = "will be suspended" if suspend else "will run"
    return console.tell(resource_record(body), f"{name} {done if context.options.wait else asked}")


def is_ready(body: Body, reason: str) -> bool:
    """Say whether it is Ready as it was asked to be: `Running`, or `Suspended`, and the status is about this spec."""
    ready = condition(body, "Ready")
    return ready.get("status") == "True" and ready.get("reason") == reason


def accept(context: Context) -> Exit:
    """Annotate: go on from the stored pair."""
    cluster, options = open_cluster(context), context.options
    body = cluster.get(options.processor)
    conflict = open_conflict(body, options.conflict)
    if conflict.get("stored") is None:
        raise RefusedError("the checkpoint's row is gone, so there is no pair to accept: rewind instead")
    question = f"Accept {conflict['stored']} for conflict {conflict['id']} (expected {conflict.get('expected')})?"
    return _decide(context, cluster, body, ACCEPT_ANNOTATION, conflict, conflict["stored"], question)


def rewind(context: Context) -> Exit:
    """Annotate: go on from a pair of the person's choice; only for an open conflict."""
    cluster, options = open_cluster(context), context.options
    body = cluster.get(options.processor)
    pair: Checkpoint | None = options.to
    if pair is None or options.partition is not None or options.reason:
        raise RefusedError(
            "in a cluster only --to TRANSACTION_ID:POSITION can be said, and --conflict; the rest needs the database"
        )
    conflict = open_conflict(body, options.conflict)
    question = f"Go on from {pair} for conflict {conflict['id']} (stored {conflict.get('stored')})?"
    return _decide(context, cluster, body, REWIND_ANNOTATION, conflict, str(pair), question)


def open_conflict(body: Body, number: int | None) -> Body:
    """Return the conflict that waits for a person; refuse where none does, or another one than `number`."""
    found: Body | None = ((body.get("status") or {}).get("conflicts") or {}).get("open")
    if found is None:
        raise RefusedError(
            "no conflict is open, so there is nothing to decide. To move a checkpoint without one: pause the resource, "
            "then `outbox rewind` or `outbox skip-to` against its database, then resume"
        )
    if number not in (None, found["id"]):
        raise RefusedError(f"conflict {found['id']} is open, not {number}")
    return found


def _decide(  # one act, said once for both verbs
    context: Context,
    cluster: Cluster,
    body: Body,
    annotation: str,
    conflict: Body,
    pair: str,
    question: str,
) -> Exit:
    console = context.console
    value = f"{conflict['id']}={pair}"
    record = {"name": body["metadata"]["name"], "conflict": conflict, "annotation": annotation, "value": value}
    if context.options.dry_run:
        return console.tell(record | {"done": False}, f"would annotate {annotation}={value}")
    if context.options.yes and context.options.conflict is None:
        raise RefusedError(f"with --yes name the conflict that you saw: --conflict {conflict['id']}")
    console.confirm(question)
    # The former decision goes: two of them decide nothing.
    annotations = dict.fromkeys((ACCEPT_ANNOTATION, REWIND_ANNOTATION)) | {annotation: value}
    cluster.patch(body["metadata"]["name"], {"metadata": {"uid": body["metadata"]["uid"], "annotations": annotations}})
    if context.options.wait:
        wait_for(
            console, cluster, body, "decided",
            lambda found: annotation not in (found["metadata"].get("annotations") or {}), context.options.timeout,
        )  # fmt: skip
    return console.tell(record | {"done": True}, f"annotated {annotation}={value}")


def wait_for(
    console: Console, cluster: Cluster, asked: Body, what: str, holds: Callable[[Body], bool], timeout: float
) -> Body:
    """Poll until it holds for the resource that was `asked`; an API server that is away meanwhile costs time only."""
    begun, name, uid = time.monotonic(), asked["metadata"]["name"], asked["metadata"]["uid"]
    body = asked
    with console.progress(f"seconds waited until {name} is {what}") as progress:
        while True:
            away: AwayError | None = None
            try:
                body = cluster.get(name)
            except AwayError as err:
                away = err
            except RefusedError as err:
                raise CommandError(f"{name} was asked, and went before it was {what}: {err}") from err
            if body["metadata"]["uid"] != uid:
                raise CommandError(f"{name} was asked, and went before it was {what}: another has its name now")
            if away is None and holds(body):
                return body
            waited = time.monotonic() - begun
            if waited > timeout:
                why = away or _service(cluster, body) or _said(body)
                raise CommandError(f"{name} is not {what} after {timeout:.0f} s ({why})")
            progress.reach(int(waited))
            time.sleep(POLL_SECONDS)


def _service(cluster: Cluster, body: Body) -> str | None:
    return decide_service(fetch_operators(cluster), body["metadata"]["namespace"], looked_at=is_looked_at(body))


def _said(body: Body) -> str:
    ready = condition(body, "Ready")
    return f"{ready.get('reason')}: {ready.get('message')}" if ready else "its status is not current"
