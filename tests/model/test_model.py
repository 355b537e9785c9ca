"""The protocol's model holds, and every bad variant of it fails where it should; and it is still the product's."""

from __future__ import annotations

import re

import pytest

from outbox_core.processor.state import STANDBY_POLL, Policy
from outbox_core.progress.checkpoint import StoreAnswer
from outbox_core.spec import Delivery
from outbox_worker.postgres.transactions import transaction
from tests.model.cases import AGAIN, BAD, GOOD, LARGE, POSSIBLE
from tests.model.checker import MODELS, ROOT, Question, check, configuration, run
from tests.support.database.contract import NOTHING, Model
from tests.support.database.sql_functions import read_function
from tests.support.nightly import at_night

ACTIONS = {
    "Acquire", "Load", "Begin", "AskToStore", "TakeAnswer", "AskToCommit", "HearOfCommit", "FindBroken", "Confirm",
    "Record", "Fence", "Compare", "Commit", "EndIdle", "Drop", "Lapse", "Freeze", "Thaw", "LoseHeartbeat", "Cut",
    "Crash", "Leave", "Edit", "Resolve",
}  # fmt: skip


AT_NIGHT = [
    # A bad variant that is found out says already that the model comes to what is asked about.
    *at_night(*AGAIN, *POSSIBLE),
    *(pytest.param(case, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)]) for case in LARGE),
]


@pytest.mark.parametrize("case", [*GOOD, *BAD, *AT_NIGHT], ids=lambda case: f"{case.name} ({case.verdict})")
def test_the_model_says(case, tmp_path):
    result = check(case.question, tmp_path, long=case in LARGE)
    assert result.verdict == case.verdict, result.output


def test_every_action_is_taken(tmp_path):
    question = Question(constants={"Faults": "1", "Edits": "1", "Last": "1"}, symmetric=True)
    output = check(question, tmp_path, "-coverage", "1").output
    taken = {name: int(count) for name, count in re.findall(r"^<(\w+) line .*>: \d+:(\d+)$", output, re.MULTILINE)}
    assert {name for name, count in taken.items() if count} >= ACTIONS


def test_answers_are_those_of_the_contract(tmp_path):
    """With `tests/contract`, which compares the SQL with the same table, the model's codes are the database's."""
    asked = [
        (stored, new, expected)
        for stored in range(-1, 4)
        for new in range(4)
        for expected in range(4)
        if new > expected
    ]
    rows = ", ".join(f"<<{s}, {n}, {e}, Answer({s}, {n}, {e})>>" for s, n, e in asked)
    for module in MODELS.glob("*.tla"):
        (tmp_path / module.name).write_text(module.read_text())
    (tmp_path / "Answers.tla").write_text(f"---- MODULE Answers ----\nEXTENDS Fence\nASSUME PrintT({{{rows}}})\n====\n")
    tiny = Question(constants={"Last": "1", "Faults": "0"}, invariants=("TypeOK",))
    (tmp_path / "Answers.cfg").write_text(configuration(tiny))

    output = run("Answers", tmp_path).output

    said = {tuple(map(int, row)) for row in re.findall(r"<<(-?\d+), (\d+), (\d+), (\d)>>", output)}
    owner = (1, "token")
    assert len(said) == len(asked)
    for stored, new, expected, code in said:
        contract = Model(row=None if stored < 0 else (stored, 0), live=owner)
        assert StoreAnswer(code) == contract.store((new, 0), (expected, 0) if expected >= 0 else NOTHING, owner)


def test_times_are_those_of_the_worker():
    said = dict(re.findall(r"^  (\w+) = (\d+)$", (MODELS / "Takeover.cfg").read_text(), re.MULTILINE))
    policy = Policy(Delivery())
    lease = policy.delivery.lease_duration.total_seconds()
    acquire = read_function("acquire_lease")
    assert int(said["Lease"]) == lease
    assert int(said["Beat"]) == lease / 3
    assert int(said["Idle"]) == lease * transaction._IDLE_SHARE
    assert int(said["Poll"]) == policy.standby_poll == STANDBY_POLL
    assert f"lock_timeout = '{said['LockWait']}s'" in acquire
    assert int(said["Bound"]) == lease + STANDBY_POLL


def test_every_file_that_the_page_names_is_there():
    named = re.findall(r"`((?:sql|worker|tests|docs)/[\w/.]+)`", (MODELS / "README.md").read_text())
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).exists()] == []
