"""`-f` takes what the API server takes, and refuses what it refuses, with the rule's own message.

`tests/acceptance/test_crd.py` sends the same manifests to a real API server and compares.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import yaml

from outbox_cli.admission import admit, is_about_change
from outbox_cli.errors import CommandError
from outbox_cli.manifest import read_manifest
from tests.support.manifests import (
    BAD_NAMES,
    CHANGES,
    INVALID,
    REBUILD,
    SOURCE,
    VALID,
    bodies,
    generated,
    manifest,
    rules_of_the_crd,
    worker,
)


def read(tmp_path, spec, name="orders"):
    """Read a manifest as every command with -f does."""
    file = tmp_path / "orders.yaml"
    file.write_text(yaml.safe_dump(manifest("shop", spec, name)))
    return read_manifest([file]).processor


@pytest.mark.parametrize("spec", VALID)
def test_what_the_crd_admits_is_read(tmp_path, spec):
    assert read(tmp_path, spec).processor_id == spec.get("processorId", "orders")


@pytest.mark.parametrize(("spec", "words"), INVALID)
def test_what_the_crd_refuses_is_refused_with_the_same_words(tmp_path, spec, words):
    with pytest.raises(CommandError) as refusal:
        read(tmp_path, spec)
    assert words in str(refusal.value)


@pytest.mark.parametrize(("name", "words"), BAD_NAMES)
def test_a_bad_name_is_refused(tmp_path, name, words):
    with pytest.raises(CommandError) as refusal:
        read(tmp_path, worker(), name)
    assert words in str(refusal.value)


def test_every_rule_of_the_crd_refuses_a_manifest_with_its_own_message():
    """A rule about a change has a case in CHANGES, which only an API server can judge."""
    said = "; ".join(fault for _, body in bodies("shop") for fault in admit(body)[1])
    changes = [str(case.values[2]) for case in CHANGES if case.values[2]]
    silent = [
        rule["message"]
        for rule in rules_of_the_crd()
        if (
            not any(words in rule["message"] for words in changes)
            if is_about_change(rule)
            else rule["message"] not in said
        )
    ]
    assert silent == []


def test_many_combinations_are_judged_and_what_is_admitted_is_read(tmp_path):
    admitted = [spec for spec in generated(7, 60) if not admit(manifest("shop", spec))[1]]
    assert 5 < len(admitted) < 55, "both kinds must be there"
    for spec in admitted:
        read(tmp_path, spec)


def test_defaults_are_those_that_the_api_server_would_write():
    admitted, faults = admit(manifest("shop", worker()))
    assert faults == []
    assert (admitted["spec"]["engine"], admitted["spec"]["delivery"]["mode"]) == ("Worker", "Ordered")
    assert admitted["spec"]["delivery"]["leaseDuration"] == "15s"


def test_null_is_absent_as_for_the_api_server(tmp_path):
    processor = read(tmp_path, {"source": SOURCE, "target": {"log": {}, "sql": None}, "rebuildOf": None})
    assert processor.spec.rebuild_of is None


def test_a_time_without_quotation_marks_is_read_as_kubectl_reads_it(tmp_path):
    file = tmp_path / "orders.yaml"
    text = yaml.safe_dump(manifest("shop", worker(startFrom={"type": "Timestamp", "timestamp": "T"})))
    file.write_text(text.replace("timestamp: T", "timestamp: 2026-01-01T00:00:00Z"))
    assert str(read_manifest([file]).processor.spec.start_from.timestamp) == "2026-01-01 00:00:00+00:00"


def test_a_misspelt_field_names_the_one_that_was_meant(tmp_path):
    with pytest.raises(CommandError, match=r'unknown field "spec\.delivery\.batchsize": did you mean batchSize\?'):
        read(tmp_path, worker(delivery={"batchsize": 5}))


def test_the_status_that_kubectl_printed_is_left_alone():
    body = manifest("shop", worker(rebuildOf=REBUILD)) | {"status": {"phase": 7, "surprise": 1}}
    assert admit(body)[1] == []


def test_a_worker_that_the_operator_starts_never_loads_the_rules():
    """The API server has validated there; CEL would cost a start a quarter of a second, and memory.

    Nor does it load Prometheus' client before it is asked for metrics.
    """
    names = ("celpy", "yaml", "prometheus_client")
    look = f"import sys, outbox_worker.main, outbox_cli.main; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
