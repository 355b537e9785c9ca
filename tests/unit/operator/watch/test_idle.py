"""What did not change costs nothing: when it is looked at again, what is news, what is applied, and in which order."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox_core.report import CheckpointView, HighWaterMark, Lag, LeaseView, WorkerState
from outbox_operator.api.naming import PROCESSOR_LABEL, RENDERED_ANNOTATION
from outbox_operator.api.observed import Problem
from outbox_operator.api.reasons import Reason
from outbox_operator.api.status import ProcessorStatus
from outbox_operator.decision.decide import LOOK_AGAIN, REST, decide
from outbox_operator.reconcile.apply import Applier, ObstacleError, is_news
from outbox_operator.reconcile.podstate import view_workload
from outbox_operator.reconcile.reports import figures_in
from outbox_operator.settings import Images
from outbox_operator.watch.store import OWNED_KINDS, Store, slim
from tests.unit.operator.building import NOW, WAITING, build_observed, build_pod, build_processor, build_report
from tests.unit.operator.owned import DEPLOYMENT, RESOURCE, reference_to

if TYPE_CHECKING:
    from outbox_operator.api.observed import Observed
    from outbox_operator.decision.events import Event
    from outbox_operator.watch.store import Body

SUSPENDED = build_observed(processor=build_processor(suspend=True))
UNSCHEDULABLE = build_pod(phase="Pending", ip=None, ready=False, problem=Problem(Reason.UNSCHEDULABLE, "no node"))
WAITS = build_observed(UNSCHEDULABLE)
LOST = build_pod(ready=False, deleting=True)


def after(observed: Observed, seconds: float) -> timedelta:
    """When it is looked at again if nothing has changed since it was decided first."""
    status = decide(observed, NOW).status
    return decide(replace(observed, previous=status), NOW + timedelta(seconds=seconds)).look_again


@pytest.mark.parametrize(
    ("observed", "seconds", "again"),
    [
        pytest.param(SUSPENDED, 0, REST, id="suspended"),
        pytest.param(build_observed(build_pod(report=build_report())), 0, REST, id="it works: its report tells news"),
        pytest.param(WAITS, 0, LOOK_AGAIN, id="in flight since just now"),
        pytest.param(WAITS, 60, timedelta(seconds=15), id="in flight for a minute"),
        pytest.param(WAITS, 86_400, REST, id="in flight for a day"),
        pytest.param(replace(SUSPENDED, unsettled=NOW), 4, LOOK_AGAIN, id="a pod of which time tells more"),
        pytest.param(build_observed(previous=WAITING), 60, LOOK_AGAIN, id="the claim is asked for"),
        pytest.param(replace(SUSPENDED, previous=WAITING), 60, REST, id="suspended: the claim is not asked for"),
        pytest.param(build_observed(LOST, previous=WAITING), 60, REST, id="nor while a pod of it is on a lost node"),
    ],
)
def test_it_is_looked_at_again_when_time_may_tell_more(observed: Observed, seconds: float, again: timedelta):
    assert after(observed, seconds) == again


def status_of(**fields: Any) -> Body:
    decided = decide(build_observed(build_pod(report=build_report(**fields))), NOW)
    return decided.status.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_a_bound_that_moves_is_not_in_the_status_and_one_that_stands_still_is():
    one, other = (
        status_of(high_water_mark=HighWaterMark(transaction_id=held, age_seconds=0.5)) for held in ("815", "900")
    )
    assert "highWaterMark" not in one
    assert not is_news(one, other)
    assert (
        status_of(high_water_mark=HighWaterMark(transaction_id="815", age_seconds=60))["highWaterMark"]["transactionId"]
        == "815"
    )


LEASE = LeaseView(epoch=4, pod="orders-0", held=True)


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        pytest.param({"time": NOW + timedelta(seconds=2)}, True, id="the time"),
        pytest.param(
            {"high_water_mark": HighWaterMark(transaction_id="900", age_seconds=1)}, True, id="a bound that moves"
        ),
        pytest.param({"lease": LEASE.model_copy(update={"expires_at": NOW})}, True, id="a lease that is renewed"),
        pytest.param({"handled": 7, "batches": 1}, True, id="counters of the process"),
        pytest.param({"lag": Lag(messages=1, seconds=0.1)}, False, id="what waits"),
        pytest.param(
            {"high_water_mark": HighWaterMark(transaction_id="900", age_seconds=60)},
            False,
            id="a bound that stands still",
        ),
    ],
)
def test_the_figures_of_a_report_are_those_that_status_shows(fields: dict[str, Any], same: bool):
    before = build_report(WorkerState.ACTIVE, high_water_mark=HighWaterMark(transaction_id="815", age_seconds=0))
    assert (figures_in(before) == figures_in(build_report(WorkerState.ACTIVE, **fields))) is same
    moved = before.model_copy(update={"checkpoints": [CheckpointView(pair="815:43")]})
    assert figures_in(before) != figures_in(moved)


class Server:
    """Keeps what is applied, as the API server does: a change has another version, and generation."""

    def __init__(self) -> None:
        self.objects: dict[str, Body] = {}
        self.calls: list[str] = []
        self.store = Store()
        self.edited: set[str] = set()
        """Kinds that another client edits as soon as the Deployment is applied; a watch tells at once."""
        self.namesake: Body | None = None
        """The watch tells of it as soon as the Deployment is applied."""
        self.told: set[str] = set()
        """Uids of resources whose status was written."""

    async def create(self, manifest: Body) -> Body:
        self.calls.append(f"create {manifest['kind']}")
        return manifest

    async def get(self, _place: object) -> None:
        return None

    async def apply(self, manifest: Body) -> Body:
        kind = manifest["kind"]
        self.calls.append(f"apply {kind}")
        known = self.objects.get(kind, {"metadata": {"resourceVersion": "10", "generation": 1}})["metadata"]
        meta = {**manifest["metadata"], "uid": kind, "creationTimestamp": "2026-01-01T12:00:00Z"}
        self.objects[kind] = applied = {**manifest, "metadata": {**known, **meta}}
        for name in self.edited if kind == "Deployment" else ():
            former = self.objects[name]["metadata"]
            changed = {
                "resourceVersion": str(int(former["resourceVersion"]) + 1),
                "generation": former["generation"] + 1,
            }
            self.objects[name] = {**self.objects[name], "metadata": {**former, **changed}}
            self.store.put(slim(self.objects[name]))
        if kind == "Deployment" and self.namesake is not None:
            self.store.put(slim(self.namesake))
        return applied

    async def apply_status(self, manifest: Body) -> Body:
        self.calls.append("apply status")
        self.told.add(manifest["metadata"]["uid"])
        version = int(self.objects["resource"]["metadata"]["resourceVersion"]) + 1
        meta = {**self.objects["resource"]["metadata"], "resourceVersion": str(version)}
        self.objects["resource"] = {**self.objects["resource"], "metadata": meta, "status": manifest["status"]}
        return self.objects["resource"]

    async def write(self, _processor: object, event: Event) -> None:
        self.calls.append(f"Event {event.reason}")

    async def round(self, *, suspend: bool = True) -> list[str]:
        """What one round of a process that was just started calls."""
        self.calls.clear()
        self.store = store = Store()
        for body in self.objects.values():
            store.put(slim(body))
        images = Images()
        body = store.all_of(RESOURCE["kind"])[0]
        status = ProcessorStatus.model_validate(body.get("status") or {})
        processor = build_processor(suspend=suspend)
        workload = store.all_of("Deployment")
        observed = build_observed(processor=processor, previous=status)
        if workload:
            view = view_workload(workload[0])
            observed = replace(observed, workload=view, intent_hash=view.intent_hash)
        applier = Applier(cast("Any", self), store, images, cast("Any", self))
        await applier.apply(body, observed, decide(observed, datetime.now(UTC)))
        return list(self.calls)


APPLIED = ["apply ConfigMap", "apply Deployment"]


async def test_what_the_cluster_has_by_its_hash_is_not_applied_again():
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    calls = await server.round()
    assert [call for call in calls if call in APPLIED] == APPLIED
    await server.round()  # the hash of the workload is known by now
    assert await server.round() == [], "a restart"

    server.objects["Deployment"]["metadata"]["generation"] = 2
    assert [call for call in await server.round() if call in APPLIED] == APPLIED, "another client changed it meanwhile"
    await server.round()
    assert await server.round() == []
    del server.objects["ConfigMap"]
    assert [call for call in await server.round() if call in APPLIED] == APPLIED, "another client deleted it"


@pytest.mark.parametrize(("part", "name"), [("labels", PROCESSOR_LABEL), ("annotations", RENDERED_ANNOTATION)])
async def test_a_label_or_an_annotation_that_another_client_changed_is_put_back(part: str, name: str):
    """Neither changes the generation of a Deployment."""
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    for _ in range(2):
        await server.round()
    assert await server.round() == []
    meta = server.objects["Deployment"]["metadata"]
    server.objects["Deployment"]["metadata"] = {**meta, part: {**meta[part], name: "another", "theirs": "stays"}}
    assert [call for call in await server.round() if call in APPLIED] == APPLIED


async def test_status_is_written_first_then_events_and_then_pods_are_scaled():
    """A process that is killed in between leaves written what it was about to do."""
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    await server.round(suspend=False)
    assert server.objects["Deployment"]["spec"]["replicas"] == 1
    calls = await server.round()
    assert server.objects["Deployment"]["spec"]["replicas"] == 0
    (event,) = (call for call in calls if call.startswith("Event"))
    assert calls[0] == "apply status"
    assert calls.index("apply status") < calls.index(event) < calls.index("apply Deployment")


async def test_a_status_that_says_the_same_is_not_written():
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    for _ in range(3):
        await server.round()
    before = server.objects["resource"]["metadata"]["resourceVersion"]
    assert await server.round() == []
    assert server.objects["resource"]["metadata"]["resourceVersion"] == before


async def test_the_status_of_a_deleted_resource_is_not_written_onto_its_namesake():
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    again = {**RESOURCE["metadata"], "uid": "uid-2", "resourceVersion": "99"}
    server.namesake = {**RESOURCE, "metadata": again}
    await server.round()
    assert server.told == {"uid-1"}


async def test_objects_of_a_deleted_namesake_are_waited_for_and_no_fault():
    """The garbage collector has not come to them yet; a watch tells when it has."""
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    server.objects["Deployment"] = DEPLOYMENT
    calls = await server.round()
    assert [call for call in calls if call in APPLIED] == ["apply ConfigMap"]
    del server.objects["Deployment"]
    assert [call for call in await server.round() if call in APPLIED] == APPLIED


@pytest.mark.parametrize(
    "owner",
    [
        pytest.param({"name": "bills"}, id="a resource of another name"),
        pytest.param({"kind": "Helmsman"}, id="another kind"),
        pytest.param({"controller": False}, id="it controls nothing"),
    ],
)
async def test_an_object_of_another_owner_is_a_persons_matter(owner: dict[str, Any]):
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    meta = {**DEPLOYMENT["metadata"], "ownerReferences": [reference_to(RESOURCE, **owner)]}
    server.objects["Deployment"] = {**DEPLOYMENT, "metadata": meta}
    with pytest.raises(ObstacleError, match="is not this resource's"):
        await server.round()


@pytest.mark.parametrize("kind", ["ConfigMap", "Deployment"])
async def test_an_edit_between_the_apply_and_the_hash_of_what_was_left_is_put_back(kind: str):
    server = Server()
    server.objects["resource"] = {**RESOURCE, "metadata": {**RESOURCE["metadata"], "uid": "uid-1"}}
    await server.round()
    server.edited = {kind}
    await server.round()  # the hash of the workload is known by now
    server.objects["ConfigMap"]["metadata"]["resourceVersion"] = "12"
    await server.round()
    server.edited = set()
    assert [call for call in await server.round() if call in APPLIED] == APPLIED


def test_nothing_is_kept_of_an_object_that_is_not_read():
    template = {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": []}}
    meta = {"name": "orders", "namespace": "shop", "managedFields": [{"manager": "x"}]}
    for kind in OWNED_KINDS:
        kept = slim({"kind": kind, "metadata": meta, "spec": {"replicas": 1, "template": template}, "data": {"k": "v"}})
        assert "managedFields" not in kept["metadata"]
        assert "data" not in kept
        assert "containers" not in str(kept)
