"""An upgrade of the operator: whose pods are replaced, whose wait for their turn, whose are left alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from outbox_core.report import Reason, WorkerState
from outbox_operator.api.keys import Keys
from outbox_operator.api.naming import RENDERED_ANNOTATION, SLOT_ANNOTATION, TEMPLATE_LABEL
from outbox_operator.api.observed import Observed, Slots
from outbox_operator.api.resources import ACCEPT_ANNOTATION
from outbox_operator.api.status import Condition, ProcessorStatus
from outbox_operator.decision.decide import LOOK_AGAIN, decide
from outbox_operator.decision.rollout import WAS_NOT_READY, WAS_READY, Rollout
from outbox_operator.reconcile.podstate import view_workload
from outbox_operator.reconcile.slots import SlotKeeper
from outbox_operator.rendering import manifests
from outbox_operator.rendering.manifests import build_origin, build_owned, build_template, image_of
from outbox_operator.settings import Budget, Images, read_budget, read_settings
from tests.unit.operator.building import (
    BLOCKED,
    NOW,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    condition,
    ready,
)
from tests.unit.operator.owned import build_object, store_of

if TYPE_CHECKING:
    from outbox_operator.decision.decide import Decision
    from outbox_operator.watch.store import Body

KEYS = Keys(b"master", "hash-of-the-token")
OLD = Images(worker="registry/worker:1", spark="registry/spark:1", keys=KEYS)
NEW = replace(OLD, worker="registry/worker:2", spark="registry/spark:2")
SPARK: dict[str, Any] = {"engine": "Spark", "spark": {}}
NO_SLOT = Slots(limit=1, free=False, failing="shop/bills is not Ready again (ImageUnavailable)")


def workload_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    return manifests[-1]


def template_of(workload: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = workload["spec"]["template"]
    return found


class Cluster:
    """One processor's workload and pods, through decisions of operators of any version."""

    def __init__(self, images: Images = OLD, **spec: Any) -> None:
        self.processor = build_processor(**spec)
        self.was = ProcessorStatus(observed_generation=3)
        self.workload = workload_of(build_owned(self.processor, images, 1, None, ()))
        self.pods_are(template_of(self.workload))

    def pods_are(self, template: dict[str, Any], **pod: Any) -> None:
        """The workload's controller has replaced the pods."""
        fields = {"report": build_report(), "intent_hash": template["metadata"]["labels"][TEMPLATE_LABEL], **pod}
        self.pods = [build_pod("orders-0", **fields)]

    def changed(self, **spec: Any) -> None:
        """The user changes the spec."""
        self.processor = build_processor(**spec).model_copy(update={"generation": self.processor.generation + 1})

    def observe(self, images: Images, slots: Slots) -> Observed:
        template = build_template(self.processor, images)
        observed = build_observed(
            *self.pods,
            processor=self.processor,
            previous=self.was,
            workload=view_workload(self.workload),
            origin=build_origin(self.processor, images, template),
            image=image_of(template),
            slots=slots,
        )
        return replace(observed, intent_hash=template["metadata"]["labels"][TEMPLATE_LABEL])

    def reconcile(self, images: Images, slots: Slots = NO_SLOT) -> Decision:
        decision = decide(self.observe(images, slots), NOW)
        self.was = decision.status
        owned = build_owned(
            self.processor,
            images,
            decision.replicas,
            decision.resolution,
            (),
            decision_label=decision.decision_label,
            rollout=decision.rollout,
        )
        self.workload = workload_of(owned)
        return decision

    @property
    def image(self) -> str:
        return image_of(template_of(self.workload))

    @property
    def slot(self) -> str:
        found: str = self.workload["metadata"]["annotations"].get(SLOT_ANNOTATION, "")
        return found


ENGINES = [pytest.param({}, id="Worker"), pytest.param(SPARK, id="Spark")]


@pytest.mark.parametrize("spec", ENGINES)
def test_without_a_free_slot_the_pods_stay_and_status_says_why(spec: dict[str, Any]):
    cluster = Cluster(**spec)
    cluster.reconcile(OLD)
    before = template_of(cluster.workload)
    decision = cluster.reconcile(NEW)
    assert template_of(cluster.workload) == before
    assert (ready(decision), decision.replicas) == (("True", "Running"), 1)
    assert condition(decision, "Reconciling") == ("False", "WaitingForRollout")
    message = next(c.message for c in decision.status.conditions if c.type == "Reconciling")
    assert "until it is this processor's turn" in message
    assert NEW.worker in message or NEW.spark in message
    assert "at most 1 at a time" in message
    assert (
        "shop/bills is not Ready again (ImageUnavailable): correct what it names, or roll the operator back" in message
    )
    assert decision.keep_claim == ()
    assert decision.look_again > LOOK_AGAIN, "it is woken when a slot is free"
    assert cluster.reconcile(NEW).status == decision.status


@pytest.mark.parametrize("spec", ENGINES)
def test_its_turn_lasts_until_the_new_pods_are_ready(spec: dict[str, Any]):
    cluster = Cluster(**spec)
    cluster.reconcile(OLD)
    decision = cluster.reconcile(NEW, Slots())
    assert (cluster.image in (NEW.worker, NEW.spark), cluster.slot) == (True, WAS_READY)
    assert condition(decision, "Reconciling") == ("True", "RollingOut")
    assert decision.keep_claim == ("orders-0",)
    template = template_of(cluster.workload)
    for pod in ({"ready": False, "report": None, "phase": "Pending", "ip": None}, {"ready": False}, {"deleting": True}):
        cluster.pods_are(template, **pod)
        cluster.reconcile(NEW)
        assert cluster.slot == WAS_READY, pod
    cluster.pods_are(template, report=build_report(WorkerState.RETRYING, Reason.STATEMENT_FAILED))
    cluster.reconcile(NEW)
    assert cluster.slot == WAS_READY, "it was Ready before, so the new version may be the cause"
    cluster.pods_are(template)
    decision = cluster.reconcile(NEW)
    assert (ready(decision), cluster.slot) == (("True", "Running"), "")
    assert template_of(cluster.workload) == template


def test_one_that_was_not_ready_before_holds_its_slot_until_its_pods_run():
    cluster = Cluster()
    stopped = build_report(WorkerState.STOPPED, Reason.ATTEMPTS_EXHAUSTED)
    cluster.pods_are(template_of(cluster.workload), ready=False, report=stopped)
    cluster.reconcile(OLD)
    assert condition(cluster.reconcile(NEW), "Reconciling") == ("False", "WaitingForRollout")
    cluster.reconcile(NEW, Slots())
    assert (cluster.image, cluster.slot) == (NEW.worker, WAS_NOT_READY)
    cluster.pods_are(template_of(cluster.workload), ready=False, phase="Pending", report=None)
    cluster.reconcile(NEW)
    assert cluster.slot == WAS_NOT_READY
    cluster.pods_are(template_of(cluster.workload), ready=False, report=stopped)
    cluster.reconcile(NEW)
    assert cluster.slot == ""


def test_the_operator_rolled_back_replaces_those_that_began_at_once_and_leaves_the_others_alone():
    began, waits = Cluster(), Cluster()
    for cluster in (began, waits):
        cluster.reconcile(OLD)
    began.reconcile(NEW, Slots())
    waits.reconcile(NEW)
    began.pods_are(template_of(began.workload), ready=False, report=None, phase="Pending")
    began.reconcile(OLD)
    assert (began.image, began.slot) == (OLD.worker, WAS_READY)
    assert condition(waits.reconcile(OLD), "Reconciling") == ("False", "AsExpected")
    assert waits.image == OLD.worker


def test_a_change_of_the_spec_waits_for_nothing_and_takes_no_slot():
    cluster = Cluster()
    cluster.reconcile(OLD)
    cluster.reconcile(NEW)
    cluster.changed(delivery={"batchSize": 7})
    cluster.reconcile(NEW)
    assert (cluster.image, cluster.slot) == (NEW.worker, "")
    assert condition(cluster.reconcile(NEW), "Reconciling") == ("True", "RollingOut")


def test_a_change_of_the_spec_gives_a_slot_back():
    cluster = Cluster()
    cluster.reconcile(OLD)
    cluster.reconcile(NEW, Slots())
    cluster.changed(worker={"image": "registry/worker:1"})
    cluster.reconcile(NEW)
    assert (cluster.image, cluster.slot) == (OLD.worker, "")


@pytest.mark.parametrize(
    ("spec", "replicas"),
    [
        pytest.param({"worker": {"replicas": 2}}, 2, id="replicas"),
        pytest.param({"delivery": {"mode": "Ordered"}}, 1, id="a default, written out"),
    ],
)
def test_a_change_that_asks_for_no_other_pods_does_not_jump_the_queue(spec: dict[str, Any], replicas: int):
    cluster = Cluster()
    cluster.reconcile(OLD)
    cluster.changed(**spec)
    cluster.reconcile(NEW)
    assert (cluster.image, cluster.workload["spec"]["replicas"]) == (OLD.worker, replicas)
    cluster.reconcile(NEW)
    assert cluster.image == OLD.worker


def test_what_does_not_run_gets_the_new_pods_without_a_slot():
    cluster = Cluster()
    cluster.reconcile(OLD)
    cluster.changed(suspend=True)
    cluster.reconcile(NEW)
    assert (cluster.workload["spec"]["replicas"], cluster.slot) == (0, "")
    cluster.pods = []
    cluster.changed()
    cluster.reconcile(NEW)
    assert (cluster.image, cluster.workload["spec"]["replicas"], cluster.slot) == (NEW.worker, 1, "")


def test_a_slot_is_given_back_when_nothing_runs_any_more():
    cluster = Cluster()
    cluster.reconcile(OLD)
    cluster.reconcile(NEW, Slots())
    cluster.was = BLOCKED.model_copy(update={"observed_generation": 3})
    assert cluster.reconcile(NEW).replicas == 0
    assert cluster.slot == ""


def test_a_decision_about_a_conflict_does_not_wait():
    cluster = Cluster()
    cluster.reconcile(OLD)
    cluster.was = BLOCKED.model_copy(update={"observed_generation": 3})
    cluster.processor = build_processor(annotations={ACCEPT_ANNOTATION: "7=815:60"})
    decision = cluster.reconcile(NEW)
    assert condition(decision, "Ready") == ("False", "Resolving")
    assert cluster.image == NEW.worker


@pytest.mark.parametrize("spec", ENGINES)
def test_a_template_that_is_only_written_in_another_way_replaces_no_pod(
    spec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    cluster = Cluster(**spec)
    cluster.reconcile(OLD)
    before = template_of(cluster.workload)

    def written_otherwise(*given: Any, build: Any) -> dict[str, Any]:
        template: dict[str, Any] = build(*given)
        template["spec"]["shareProcessNamespace"] = False
        return template

    for name in ("build_worker_pod", "build_driver_pod"):
        build = getattr(manifests, name)
        monkeypatch.setattr(manifests, name, lambda *given, build=build: written_otherwise(*given, build=build))
    decision = cluster.reconcile(OLD, Slots())
    assert template_of(cluster.workload) == before
    assert condition(decision, "Reconciling") == ("False", "AsExpected")
    assert ready(decision) == ("True", "Running")
    cluster.reconcile(NEW, Slots())
    assert template_of(cluster.workload)["spec"]["shareProcessNamespace"] is False, "with the next change of the image"


def test_a_rendering_that_must_be_followed_replaces_pods_in_stages(monkeypatch: pytest.MonkeyPatch):
    cluster = Cluster()
    cluster.reconcile(OLD)
    monkeypatch.setattr(manifests, "RENDERING", manifests.RENDERING + 1)
    build = vars(manifests)["build_worker_pod"]

    def with_more(*given: Any) -> dict[str, Any]:
        template: dict[str, Any] = build(*given)
        template["spec"]["shareProcessNamespace"] = False
        return template

    monkeypatch.setattr(manifests, "build_worker_pod", with_more)
    assert condition(cluster.reconcile(OLD), "Reconciling") == ("False", "WaitingForRollout")
    cluster.reconcile(OLD, Slots())
    assert cluster.slot == WAS_READY


def test_other_keys_of_the_installation_are_brought_in_stages():
    cluster = Cluster()
    cluster.reconcile(OLD)
    rekeyed = replace(OLD, keys=Keys(b"another", "hash-of-the-token"))
    assert condition(cluster.reconcile(rekeyed), "Reconciling") == ("False", "WaitingForRollout")


def test_another_name_of_the_cluster_is_brought_in_stages():
    """Workers claim under it."""
    cluster = Cluster()
    cluster.reconcile(OLD)
    cluster.processor = cluster.processor.model_copy(update={"cluster": "there"})
    assert condition(cluster.reconcile(OLD), "Reconciling") == ("False", "WaitingForRollout")


def test_pods_get_the_present_template_where_another_client_removed_what_the_former_was_rendered_for():
    cluster = Cluster()
    cluster.reconcile(OLD)
    del cluster.workload["metadata"]["annotations"][RENDERED_ANNOTATION]
    cluster.reconcile(NEW)
    assert (cluster.image, cluster.slot) == (NEW.worker, "")


def test_a_spark_driver_that_waits_makes_executors_of_its_own_image():
    cluster = Cluster(**SPARK)
    waits = Rollout(template=template_of(cluster.workload))
    config_map = build_owned(cluster.processor, NEW, 1, None, (), rollout=waits)[0]
    plan = json.loads(config_map["data"]["processor.json"])["spark"]
    assert plan["config"]["spark.kubernetes.container.image"] == OLD.spark


@pytest.mark.parametrize("containers", [{}, None])
def test_an_overlay_that_takes_the_containers_out_is_left_to_the_api_server(containers: Any):
    cluster = Cluster(worker={"podTemplate": {"spec": {"containers": containers}}})
    cluster.reconcile(OLD)
    assert cluster.image == ""


def test_what_is_written_down_stays_small():
    cluster = Cluster()
    assert len(cluster.workload["metadata"]["annotations"][RENDERED_ANNOTATION]) < 4096


def processor(name: str, **more: Any) -> Body:
    body = build_object("OutboxProcessor", name) | {"spec": {}, **more}
    return body


def deployment(name: str, slot: str = "", version: str = "7") -> Body:
    notes = {SLOT_ANNOTATION: slot} if slot else {}
    body = build_object("Deployment", f"{name}-worker", annotations=notes, resourceVersion=version)
    body["metadata"]["labels"]["outbox-operator.dev/processor"] = name
    return body | {"spec": {"template": {"metadata": {}}}}


def keeper(*bodies: Body, budget: str = "1") -> tuple[SlotKeeper, list[Any]]:
    woken: list[Any] = []
    return SlotKeeper(store_of(*bodies), read_budget(budget), woken.append), woken


ORDERS, BILLS = ("shop", "orders"), ("shop", "bills")


def test_a_slot_on_a_workload_counts_also_when_another_operator_gave_it():
    slots, _ = keeper(processor("orders"), deployment("orders", WAS_READY), processor("bills"), deployment("bills"))
    assert not slots.look(BILLS).free
    assert slots.look(ORDERS).free, "its own"


def test_a_slot_counts_from_the_decision_on():
    slots, _ = keeper(processor("orders"), processor("bills"))
    with slots.kept(ORDERS, Rollout(slot=WAS_READY)):
        assert not slots.look(BILLS).free
    assert slots.look(BILLS).free, "it was not written"


def test_who_waits_is_woken_when_a_slot_is_given_back():
    slots, woken = keeper(processor("orders"), deployment("orders", WAS_READY), processor("bills"))
    with slots.kept(BILLS, Rollout(waits="its turn")):
        pass
    slots.wake()
    assert woken == []
    with slots.kept(ORDERS, Rollout()):
        slots._store.put(deployment("orders", version="8"))
    assert woken == [BILLS]


def test_all_who_wait_are_woken_when_one_fails_and_when_it_does_no_more():
    conditions = [{"type": "Ready", "status": "False", "reason": "ImageUnavailable"}]
    slots, woken = keeper(processor("orders"), deployment("orders", WAS_READY), processor("bills"), processor("rents"))

    def wait() -> None:
        for key in (BILLS, ("shop", "rents")):
            with slots.kept(key, Rollout(waits="its turn")):
                pass

    wait()
    assert woken == []
    failing = processor("orders", status={"conditions": conditions})
    failing["metadata"]["resourceVersion"] = "8"
    slots._store.put(failing)
    slots.wake()
    assert woken == [BILLS, ("shop", "rents")]
    wait()
    assert len(woken) == 2, "they were told"


UNREADY_SIDECAR = [("Ready", "True", "Running"), ("WorkersAvailable", "False", "Starting")]


@pytest.mark.parametrize(
    ("conditions", "said"),
    [
        ([("Ready", "False", "RollingOut")], ""),
        (UNREADY_SIDECAR, ""),
        ([("Ready", "True", "Running")], ""),
        ([("Ready", "False", "StatementFailed")], "shop/orders is not Ready again (StatementFailed)"),
        (
            [("Ready", "False", "RollingOut"), ("WorkersAvailable", "False", "ImageUnavailable")],
            "shop/orders is not Ready again (ImageUnavailable)",
        ),
    ],
)
def test_the_one_that_holds_up_the_others_is_named(conditions: list[tuple[str, str, str]], said: str):
    assert failing(conditions, timedelta(0)) == said


def failing(conditions: list[tuple[str, str, str]], since: timedelta) -> str:
    """What those who wait are told of the one whose conditions have been so for that long."""
    written = [
        Condition(type=kind, status=status, reason=reason, last_transition_time=datetime.now(UTC) - since)
        for kind, status, reason in conditions
    ]
    status = {"conditions": [each.model_dump(mode="json", by_alias=True) for each in written]}
    slots, _ = keeper(processor("orders", status=status), deployment("orders", WAS_READY), processor("bills"))
    return slots.look(BILLS).failing


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        pytest.param([("Ready", "False", "RollingOut")], "RollingOut", id="an old pod does not end"),
        pytest.param(UNREADY_SIDECAR, "Starting", id="a container beside the worker does not become ready"),
    ],
)
def test_a_replacement_that_takes_long_is_named_though_nothing_fails(
    conditions: list[tuple[str, str, str]], reason: str
):
    assert failing(conditions, timedelta(minutes=6)) == f"shop/orders is not Ready again ({reason})"


def test_what_was_not_wholly_ready_before_need_not_be_so_again():
    """A container beside the worker that is never ready must not hold up the others without an end."""
    cluster = Cluster()
    cluster.pods_are(template_of(cluster.workload), ready=False)
    assert ready(cluster.reconcile(OLD)) == ("True", "Running")
    cluster.reconcile(NEW, Slots())
    assert cluster.slot == WAS_NOT_READY
    cluster.pods_are(template_of(cluster.workload), ready=False)
    cluster.reconcile(NEW)
    assert cluster.slot == ""


@pytest.mark.parametrize(
    ("text", "processors", "limit"),
    [("10%", 0, 1), ("10%", 19, 1), ("10%", 50, 5), ("100%", 7, 7), ("3", 2, 3), ("0", 50, 0)],
)
def test_the_budget_is_a_number_or_a_share(text: str, processors: int, limit: int):
    assert read_budget(text).of(processors) == limit


@pytest.mark.parametrize("text", ["", "-1", "0%", "101%", "1.5", "ten", "10 %"])
def test_a_budget_that_is_none_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="neither a number of processors"):
        read_budget(text)


def test_the_chart_sets_the_budget():
    assert read_settings([], {}).budget == Budget(10, percent=True)
    assert read_settings([], {"OUTBOX_ROLLOUT_MAX_CONCURRENT": "3"}).budget == Budget(3, percent=False)
