"""What failing messages did is known from a worker that has looked; one that was just started says nothing of it."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_core.report import BlockedKey, FailureSummary, LeaseView, Reason, Report, Unfinished, WorkerState
from outbox_operator.decision.decide import Decision, decide
from tests.unit.operator.building import NOW, build_observed, build_pod, build_processor, build_report, condition

KEY = BlockedKey(key="7", message_id="m", attempts=3, error_class="ValueError", dead_letter=True)
SEEN = FailureSummary(held=3, dead_letters=2, blocked_keys=[KEY])


def decide_after_look(*reports: Report) -> Decision:
    """Decide what `reports` tell once status has what a worker of before saw."""
    before = decide(build_observed(build_pod(report=build_report(failures=SEEN))), NOW).status
    pods = [build_pod(report.pod, report) for report in reports]
    return decide(build_observed(*pods, previous=before), NOW)


def counts(decision: Decision) -> tuple[int, int, list[str]]:
    failures = decision.status.failures
    assert failures is not None
    return failures.held, failures.dead_letters, [blocked.key for blocked in failures.blocked_keys]


@pytest.mark.parametrize(
    "state",
    [WorkerState.STARTING, WorkerState.STANDBY, WorkerState.ACTIVE, WorkerState.UNAVAILABLE],
)
def test_a_worker_that_has_not_looked_takes_no_failure_back(state: WorkerState):
    fresh = Report.model_validate_json(build_report(state, Reason.STARTING, circuit="Closed").model_dump_json())
    decision = decide_after_look(fresh)
    assert counts(decision) == (3, 2, ["7"])
    assert condition(decision, "MessagesFlow") == ("Unknown", "NotObserved")


def test_one_that_has_looked_speaks_for_an_owner_that_has_not():
    lease = LeaseView(epoch=5, pod="orders-1", held=True)
    fresh = build_report(pod="orders-1", lease=lease)
    old = build_report(WorkerState.STANDBY, failures=SEEN.model_copy(update={"held": 4}))
    decision = decide_after_look(fresh, old)
    assert counts(decision) == (4, 2, ["7"])
    assert condition(decision, "MessagesFlow") == ("False", "KeyBlocked")


def test_one_that_looked_and_found_none_takes_them_back():
    decision = decide_after_look(build_report(failures=FailureSummary()))
    assert counts(decision) == (0, 0, [])
    assert condition(decision, "MessagesFlow") == ("True", "AsExpected")


def test_an_open_breaker_is_told_before_the_first_look():
    decision = decide_after_look(build_report(circuit="Open"))
    assert decision.status.failures is not None
    assert decision.status.failures.circuit == "Open"
    assert condition(decision, "MessagesFlow") == ("False", "CircuitOpen")


def said(decision: Decision, kind: str) -> str:
    return next(found.message for found in decision.status.conditions if found.type == kind)


@pytest.mark.parametrize(
    ("seen", "count"),
    [
        pytest.param({"failures": SEEN}, 3, id="held messages"),
        pytest.param({"failures": FailureSummary(), "unfinished": Unfinished(retries=1)}, 1, id="mode Competing"),
    ],
)
def test_an_idle_worker_is_not_said_to_have_nothing_that_waits(seen: dict[str, Any], count: int):
    decision = decide(build_observed(build_pod(report=build_report(reason=Reason.IDLE, **seen))), NOW)
    assert said(decision, "Ready").startswith(f"no message is due now; {count} wait")
    assert condition(decision, "Ready") == ("True", "Running"), "whether it works is another question"


def test_an_idle_worker_with_nothing_held_has_nothing_to_do():
    decision = decide(
        build_observed(build_pod(report=build_report(reason=Reason.IDLE, failures=FailureSummary()))), NOW
    )
    assert said(decision, "Ready") == "nothing waits to be handled"


def test_what_waits_for_another_attempt_in_mode_competing_is_counted():
    report = build_report(failures=FailureSummary(), unfinished=Unfinished(retries=2))
    decision = decide(build_observed(build_pod(report=report)), NOW)
    assert said(decision, "MessagesFlow") == "0 messages held; 2 wait for another attempt or for a later time"


ORDERED: dict[str, Any] = {}
BY_KEY = {"blocks": "Key", "whenExhausted": "DeadLetter"}
COMPETING = {"mode": "Competing", "competing": {}}


@pytest.mark.parametrize(
    ("delivery", "state", "reason", "answer"),
    [
        pytest.param(
            ORDERED, WorkerState.RETRYING, Reason.STATEMENT_FAILED, ("False", "StatementFailed"),
            id="mode Ordered tries one message again",
        ),
        pytest.param(
            ORDERED, WorkerState.RETRYING, Reason.MESSAGE_DELAYED, ("False", "MessageDelayed"),
            id="mode Ordered waits for a delayed message",
        ),
        pytest.param(
            ORDERED, WorkerState.STOPPED, Reason.ATTEMPTS_EXHAUSTED, ("False", "AttemptsExhausted"),
            id="mode Ordered has stopped",
        ),
        pytest.param(
            BY_KEY, WorkerState.RETRYING, Reason.STATEMENT_FAILED, ("True", "AsExpected"),
            id="a message blocks no more than its key",
        ),
        pytest.param(
            COMPETING, WorkerState.RETRYING, Reason.STATEMENT_FAILED, ("True", "AsExpected"),
            id="mode Competing goes on with other batches",
        ),
        pytest.param(
            COMPETING, WorkerState.STOPPED, Reason.ATTEMPTS_EXHAUSTED, ("False", "AttemptsExhausted"),
            id="mode Competing has stopped",
        ),
    ],
)  # fmt: skip
def test_messages_do_not_flow_while_all_of_them_wait_for_one(
    delivery: dict[str, Any], state: WorkerState, reason: Reason, answer: tuple[str, str]
):
    report = build_report(state, reason, attempt=3, failures=FailureSummary(), circuit="Closed")
    standby = build_pod("orders-1", build_report(WorkerState.STANDBY, pod="orders-1"))
    processor = build_processor(delivery=delivery)
    decision = decide(build_observed(build_pod(report=report), standby, processor=processor), NOW)
    assert condition(decision, "MessagesFlow") == answer
