"""The stored checkpoint against Spark's query checkpoint directory: the table of `streaming/resume.py`, row by row."""

from __future__ import annotations

import pytest

from outbox_core.progress.checkpoint import Checkpoint
from outbox_spark.streaming.resume import DirectoryView, Lineage, Resume, decide_resume

NOW = Lineage("db-1")
DECIDED = Lineage("db-1", 7)
OLD, MIDDLE, COMMITTED, PLANNED, NEW = (Checkpoint(n, 1) for n in (10, 15, 20, 30, 40))


def decide(view, stored, *, now=NOW, stateful=False, untouched=False, settled=True):
    return decide_resume(view, stored, now=now, stateful=stateful, untouched=untouched, settled=settled)


def directory(lineage: Lineage = NOW, *, has_state: bool = False, planned: Checkpoint = PLANNED) -> DirectoryView:
    return DirectoryView(lineage, COMMITTED, planned, has_state)


@pytest.mark.parametrize(
    ("view", "stored", "action"),
    [
        pytest.param(None, MIDDLE, Resume.BEGIN, id="the directory is lost: go on from the row"),
        pytest.param(directory(), COMMITTED, Resume.CONTINUE, id="the planned batch was not stored: run it"),
        pytest.param(directory(), PLANNED, Resume.CONTINUE, id="the planned batch was stored: it is answered 0"),
        pytest.param(directory(), NEW, Resume.CONTINUE, id="an older directory was restored: replay is answered 0"),
        pytest.param(directory(), Checkpoint(25, 1), Resume.CONTINUE, id="the row lies inside the planned batch"),
        pytest.param(directory(), MIDDLE, Resume.REFUSE_AHEAD, id="the directory is ahead of the row: 3"),
        pytest.param(directory(planned=COMMITTED), MIDDLE, Resume.REFUSE_AHEAD, id="ahead, and nothing planned: 3"),
        pytest.param(directory(Lineage("db-0")), MIDDLE, Resume.BEGIN, id="the directory is another database's"),
        pytest.param(directory(DECIDED), MIDDLE, Resume.REFUSE_AHEAD, id="the database forgot a decision: it is older"),
    ],
)
def test_a_query_without_state(view, stored, action):
    assert decide(view, stored).action is action


@pytest.mark.parametrize(
    ("before", "since", "is_new"),
    [
        pytest.param((7, 100), (7, 100), False, id="the same act"),
        pytest.param((7, 100), (8, 200), True, id="a later act"),
        pytest.param((7, 100), (8, 50), True, id="a later act, and the clock was set back"),
        pytest.param((7, 100), (3, 50), False, id="an older dump was restored"),
        pytest.param((7, 100), (4, 200), True, id="and then a person decided: a number below"),
        pytest.param((7, 100), (7, 200), True, id="the same number, another act"),
        pytest.param((7, 100), (0, 0), False, id="the database knows no act"),
    ],
)
def test_what_a_person_decided_after_a_directory_was_begun(before, since, is_new):
    view = directory(Lineage("db-1", *before))
    decision = decide(view, COMMITTED, now=Lineage("db-1", *since))
    assert decision.action is (Resume.BEGIN if is_new else Resume.CONTINUE)


def test_after_a_persons_decision_a_new_directory_goes_on_from_the_row():
    decision = decide(directory(), OLD, now=DECIDED)
    assert decision.action is Resume.BEGIN
    assert "a person decided" in decision.message


@pytest.mark.parametrize(
    ("view", "stored", "untouched", "action"),
    [
        pytest.param(directory(has_state=True), COMMITTED, False, Resume.CONTINUE, id="state and row agree"),
        pytest.param(
            directory(has_state=True), PLANNED, False, Resume.CONTINUE, id="state is one batch behind: rebuilt"
        ),
        pytest.param(directory(has_state=True), NEW, False, Resume.REFUSE_STATE, id="state of an older row: refused"),
        pytest.param(
            directory(has_state=True), Checkpoint(25, 1), False, Resume.REFUSE_STATE, id="the row is inside a batch"
        ),
        pytest.param(directory(has_state=True), MIDDLE, False, Resume.REFUSE_AHEAD, id="ahead is 3 with state too"),
        pytest.param(None, MIDDLE, False, Resume.REFUSE_STATE, id="state is lost"),
        pytest.param(None, MIDDLE, True, Resume.BEGIN, id="nothing was ever handled: there was no state"),
    ],
)
def test_a_query_with_state(view, stored, untouched, action):
    decision = decide(view, stored, stateful=True, untouched=untouched)
    assert decision.action is action
    if action is Resume.REFUSE_STATE:
        assert "state is never guessed" in decision.message


def test_state_left_by_an_earlier_application_is_refused_too():
    decision = decide(directory(has_state=True), NEW)
    assert decision.action is Resume.REFUSE_STATE


@pytest.mark.parametrize(
    ("view", "stored", "stateful", "untouched", "action"),
    [
        pytest.param(directory(), COMMITTED, False, False, Resume.BEGIN, id="planned again, in a new directory"),
        pytest.param(directory(), Checkpoint(25, 1), False, False, Resume.BEGIN, id="the row lies inside the batch"),
        pytest.param(directory(), MIDDLE, False, False, Resume.REFUSE_AHEAD, id="the directory is ahead of the row: 3"),
        pytest.param(directory(), PLANNED, False, False, Resume.CONTINUE, id="stored: the batch is not run"),
        pytest.param(directory(), NEW, False, False, Resume.CONTINUE, id="stored, and more"),
        pytest.param(directory(has_state=True), COMMITTED, True, False, Resume.WAIT, id="state waits"),
        pytest.param(
            directory(has_state=True), COMMITTED, False, False, Resume.WAIT, id="state of an application before"
        ),
        pytest.param(directory(has_state=True), COMMITTED, True, True, Resume.BEGIN, id="nothing was ever handled"),
        pytest.param(directory(has_state=True), PLANNED, True, False, Resume.CONTINUE, id="stored: state is rebuilt"),
    ],
)
def test_a_planned_batch_with_transactions_that_are_open_or_yet_to_come(view, stored, stateful, untouched, action):
    """The server lost those that were planned, and hands out their ids again."""
    decision = decide(view, stored, stateful=stateful, untouched=untouched, settled=False)
    assert decision.action is action
    if action is Resume.WAIT:
        assert "once the server's oldest open transaction is above 30" in decision.message


def test_every_action_has_a_case():
    assert set(Resume) == {Resume.WAIT, Resume.CONTINUE, Resume.BEGIN, Resume.REFUSE_AHEAD, Resume.REFUSE_STATE}
