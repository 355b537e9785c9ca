"""Operator, workers and CRD of different versions: what one does not know it ignores, and says so."""

from __future__ import annotations

from typing import Any

from outbox_operator.api.resources import parse_processor
from outbox_operator.decision.decide import decide
from outbox_operator.reconcile.apply import dump_status
from outbox_operator.reconcile.observe import read_status
from outbox_operator.reconcile.podstate import parse_report
from tests.unit.operator.building import NOW, build_observed, build_pod, build_report

SPEC: dict[str, Any] = {
    "source": {"connection": {"secretRef": {"name": "db"}}},
    "target": {"log": {}},
    "delivery": {"batchSize": 7, "later": {"a": 1}},
}
META = {"namespace": "shop", "name": "orders", "uid": "uid-1", "generation": 3}


def test_an_older_operator_works_on_and_names_what_it_does_not_know():
    processor = parse_processor({"metadata": META, "spec": SPEC}, "here")
    assert processor.spec.delivery.batch_size == 7
    status = decide(build_observed(build_pod("orders-0", build_report()), processor=processor), NOW).status
    ready = next(each for each in status.conditions if each.type == "Ready")
    assert ready.status == "True"
    assert "this operator does not know spec.delivery.later and ignores it: upgrade the operator" in ready.message


def test_an_older_operator_keeps_what_a_newer_one_wrote_into_the_status():
    status = decide(build_observed(build_pod("orders-0", build_report())), NOW).status
    written = dump_status(status) | {"later": {"a": 1}}
    assert read_status({"status": written}) == read_status({"status": dump_status(status)})


def test_a_report_of_a_newer_worker_is_read():
    report = build_report()
    text = report.model_copy(update={"version": 2}).model_dump_json(by_alias=True)
    read = parse_report(text.removesuffix("}") + ', "later": {"a": 1}}')
    assert read is not None
    assert read.state is report.state
