"""The report, and how much of it the kubelet can keep."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from uuid import UUID

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.processor.outcomes import HeldLease
from outbox_core.processor.state import initial_state
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.report import (
    CheckpointView,
    Conflict,
    ConflictSummary,
    HighWaterMark,
    Reason,
    Report,
    ResourceRef,
    WorkerState,
)
from outbox_worker.observe.status import (
    TERMINATION_BYTES,
    Identity,
    ProcessStatus,
    Progress,
    format_termination,
    write_last_word,
    write_termination,
)

CONFIG = ProcessorConfig.model_validate(
    {
        "resource": {"cluster": "c" * 60, "namespace": "n" * 63, "name": "o" * 63, "uid": "u" * 36},
        "generation": 3,
        "processorId": "orders",
        "source": {"connection": {"secretRef": {"name": "db"}}},
        "target": {"log": {}},
    }
)
OTHER = ResourceRef(cluster="x" * 60, namespace="y" * 63, name="z" * 63, uid="w" * 36)


def process():
    return ProcessStatus(CONFIG, Identity("pod-a", "uid-a", "instance-a"), initial_state(0.0))


def longest_report() -> Report:
    conflict = Conflict(
        id=10**18, code=4, expected="1:1", stored="2:2", new="3:3", epoch=9, pod="p" * 250, time=datetime.now(UTC),
        holder=OTHER, holder_pod="q" * 250, needs_person=True,
    )  # fmt: skip
    full = process()
    blocked = initial_state(0)._replace(state=WorkerState.BLOCKED, reason=Reason.NOT_OWNER, message="é" * 3000)
    full.watch(0, lambda: blocked)
    full.set_error("ü" * 9000)
    full.claim_holder = OTHER
    full.set_observed(
        conflicts=ConflictSummary(count=1, by_code={"4": 1}, last=conflict, open=conflict),
        high_water_mark=HighWaterMark(transaction_id="1", age_seconds=1, holder="h" * 300),
    )
    report: Report = full.report()
    return report


def test_a_termination_message_fits_and_is_whole():
    text = format_termination(longest_report())
    assert len(text.encode()) <= TERMINATION_BYTES
    report = Report.model_validate_json(text)
    assert (report.state, report.conflicts.count) == (WorkerState.BLOCKED, 1)
    assert report.message


def test_a_short_report_is_not_cut():
    short = process()
    short.set_error("ValueError: no")
    assert json.loads(format_termination(short.report()))["lastError"] == "ValueError: no"


def test_it_is_written_only_where_kubernetes_looks_for_it(tmp_path):
    there = tmp_path / "termination-log"
    write_termination(process().report(), there)
    assert not there.exists()
    there.touch()
    write_termination(process().report(), there)
    assert Report.model_validate_json(there.read_text()).pod == "pod-a"


@pytest.mark.parametrize("write", [lambda path: write_termination(process().report(), path),
                                   lambda path: write_last_word("no configuration", path)])  # fmt: skip
def test_where_it_cannot_be_written_the_process_ends_as_it_would_have(tmp_path, caplog, write):
    place = tmp_path / "termination-log"
    place.symlink_to("/dev/full")
    write(place)
    assert "free the node's disk" in caplog.text


def test_what_the_owner_stored_is_newer_than_what_was_seen():
    status = process()
    status.set_observed(checkpoints=[CheckpointView(pair="5:5")])
    assert [view.pair for view in status.report().checkpoints] == ["5:5"]
    lease = HeldLease(0, 4, UUID(int=4))
    owner = initial_state(0)._replace(lease=lease, stored=Checkpoint(6, 6), state=WorkerState.ACTIVE)
    status.watch(0, lambda: owner)
    report = status.report()
    assert [view.pair for view in report.checkpoints] == ["6:6"]
    assert report.lease is not None
    assert (report.lease.held, report.lease.epoch, report.lease.pod) == (True, 4, "pod-a")
    assert status.is_ready


def test_progress_names_the_thread_that_broke_its_promise():
    progress = Progress()
    progress.expect("loop", within=60)
    progress.expect("heartbeat", within=-1)
    assert progress.overdue() == ["heartbeat"]
