"""What is read from a resource's status, without a cluster."""

from __future__ import annotations

import pytest

from outbox_cli.cluster.client import Cluster, parse_answer
from outbox_cli.cluster.resources import condition, is_ready, open_conflict, resource_record, shorten_record
from outbox_cli.errors import CommandError, Exit, RefusedError
from outbox_cli.main import main
from outbox_operator.api.resolution import read_resolution

CONFLICT = {"id": 7, "code": 2, "expected": "790:40", "stored": "815:42"}


def body(reason="Running", status="True", *, generation=3, about=3, conflict=None, **spec):
    ready = {"type": "Ready", "status": status, "reason": reason, "message": "m", "observedGeneration": about}
    return {
        "metadata": {"namespace": "shop", "name": "orders", "uid": "u", "generation": generation},
        "spec": spec,
        "status": {
            "phase": reason,
            "conditions": [ready],
            "owner": {"pod": "orders-a", "epoch": 4},
            "checkpoint": {"pair": "815:42"},
            "conflicts": {"count": 2} | ({"open": conflict} if conflict else {}),
        },
    }


def test_a_resource_is_read():
    record = resource_record(body(conflict=CONFLICT, processorId="sales", suspend=True))
    assert (record["processorId"], record["suspended"], record["engine"]) == ("sales", True, "Worker")
    assert (record["owner"], record["epoch"], record["checkpoint"]) == ("orders-a", 4, "815:42")
    assert (record["conflicts"], record["openConflict"], record["ready"]) == (2, CONFLICT, "Running")


def test_a_new_resource_has_no_status_yet():
    record = resource_record({"metadata": {"name": "orders"}, "spec": {}})
    assert (record["ready"], record["phase"], record["conflicts"]) == ("no: unknown", None, 0)


@pytest.mark.parametrize(
    ("others", "shown"),
    [
        pytest.param({}, "Running", id="all is well"),
        pytest.param({"MessagesFlow": "KeyBlocked"}, "Running, but KeyBlocked", id="a key waits for a person"),
        pytest.param(
            {"SourceCurrent": "HighWaterMarkStalled", "MessagesFlow": "DeadLetters"},
            "Running, but HighWaterMarkStalled, DeadLetters",
            id="two things",
        ),
    ],
)  # fmt: skip
def test_the_table_says_beside_ready_what_waits(others, shown):
    found = body()
    about = {"observedGeneration": 3, "message": "m"}
    found["status"]["conditions"] += [
        {"type": kind, "status": "False", "reason": reason, **about} for kind, reason in others.items()
    ]
    found["status"]["conditions"].append({"type": "Stalled", "status": "False", "reason": "AsExpected", **about})
    assert shorten_record(resource_record(found))["ready"] == shown
    assert resource_record(found)["ready"] == "Running", "as programs read it"


@pytest.mark.parametrize(
    ("found", "suspended", "running"),
    [
        pytest.param(body(), False, True, id="running"),
        pytest.param(body("Suspended"), True, False, id="suspended"),
        pytest.param(body("Stopping", "False"), False, False, id="on its way"),
        pytest.param(body(generation=4), False, False, id="status of an older spec"),
    ],
)
def test_what_waiting_waits_for(found, suspended, running):
    assert (is_ready(found, "Suspended"), is_ready(found, "Running")) == (suspended, running)


def test_an_old_condition_is_none():
    assert condition(body(generation=9), "Ready") == {}


def test_the_open_conflict_must_be_the_one_that_was_seen():
    assert open_conflict(body(conflict=CONFLICT), None) == CONFLICT
    assert open_conflict(body(conflict=CONFLICT), 7) == CONFLICT
    with pytest.raises(RefusedError, match="conflict 7 is open, not 6"):
        open_conflict(body(conflict=CONFLICT), 6)
    with pytest.raises(RefusedError, match="no conflict is open"):
        open_conflict(body(), None)


@pytest.mark.parametrize("verb", ["accept", "rewind"])
def test_the_annotation_is_what_the_operator_reads(verb):
    decided = read_resolution({f"outbox-operator.dev/{verb}-checkpoint": f"{CONFLICT['id']}={CONFLICT['stored']}"})
    assert decided is not None
    assert decided.resolution is not None
    assert (decided.resolution.conflict_id, decided.resolution.pair) == (7, "815:42")


KUBECONFIG = """
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: prod, context: {cluster: c, user: u, namespace: shop}}]
"""


def test_a_context_that_is_named_needs_no_current_one(tmp_path):
    (file := tmp_path / "config").write_text(KUBECONFIG)
    assert Cluster(file, "prod", None).namespace == "shop"
    assert Cluster(file, "prod", "other").namespace == "other"
    with pytest.raises(CommandError, match="current-context"):
        Cluster(file, None, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", ""], "'' is no name of a resource"),
        (["pause", ""], "'' is no name of a resource"),
        (["status", "shop/orders"], "'shop/orders' is no name of a resource"),
        (["status", "orders", "-A"], "say which one's orders, with -n NAMESPACE"),
    ],
)
def test_a_resource_that_is_not_named_is_asked_for_nowhere(tmp_path, capsys, arguments, said):
    (file := tmp_path / "config").write_text(KUBECONFIG)
    assert main([*arguments, "--kubeconfig", str(file), "--context", "prod"], plugin=True) == Exit.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", [b"clusters: [", b"only words", b"- a list", b"\xff\xfe\x00"], ids=["torn", "words", "list", "bytes"]
)
def test_a_kubeconfig_that_is_none_is_said(tmp_path, text):
    (file := tmp_path / "config").write_bytes(text)
    with pytest.raises(CommandError, match="no usable kubeconfig"):
        Cluster(file, None, None)


def test_a_cluster_without_our_crd_says_how_to_install_it():
    with pytest.raises(CommandError, match="has no OutboxProcessors") as told:
        parse_answer(404, b"404 page not found\n")
    assert told.value.status is Exit.FAILED
    assert "helm install" in str(told.value)


def test_answers_of_the_api_server():
    assert parse_answer(200, b'{"items": []}') == {"items": []}
    with pytest.raises(RefusedError, match="not found"):
        parse_answer(404, b'{"message": "outboxprocessors \\"x\\" not found"}')
    with pytest.raises(CommandError, match="answers 403: forbidden"):
        parse_answer(403, b'{"message": "forbidden"}')
    with pytest.raises(CommandError, match="answers 502: <html>"):
        parse_answer(502, b"<html>")
