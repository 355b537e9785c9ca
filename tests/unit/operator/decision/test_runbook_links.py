"""Messages of conditions that tell of trouble end with a link to the runbook; others do not."""

from __future__ import annotations

import pytest

from outbox_operator.api.reasons import IN_FLIGHT, ConditionType, Reason
from outbox_operator.api.status import MAX_MESSAGE
from outbox_operator.decision.conditions import link_runbook

PAGE = "https://wiki.mycompany.net/outbox/runbook"


def linked(kind: str, status: str, reason: str, message: str = "it is so") -> str:
    (condition,) = link_runbook([{"type": kind, "status": status, "reason": reason, "message": message}], PAGE)
    assert (condition["type"], condition["status"], condition["reason"]) == (kind, status, reason)
    return str(condition["message"])


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        (ConditionType.READY, "False", Reason.CONNECTION_SECRET_INVALID),
        (ConditionType.READY, "Unknown", Reason.WORKER_UNREACHABLE),
        (ConditionType.STALLED, "True", Reason.INVALID_SPEC),
        (ConditionType.SOURCE_CURRENT, "False", Reason.HIGH_WATER_MARK_STALLED),
    ],
)
def test_trouble_ends_with_the_section_of_its_reason(kind: str, status: str, reason: str) -> None:
    assert linked(kind, status, reason) == f"it is so; see {PAGE}#{reason.lower()}"
    assert linked(kind, status, reason, "") == f"see {PAGE}#{reason.lower()}"


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        (ConditionType.READY, "True", Reason.RUNNING),
        (ConditionType.STALLED, "False", Reason.AS_EXPECTED),
        (ConditionType.OWNERSHIP_GRANTED, "Unknown", Reason.NOT_OBSERVED),
        (ConditionType.SUSPENDED, "False", Reason.NOT_SUSPENDED),
        (ConditionType.RECONCILING, "True", Reason.ROLLING_OUT),
        *((ConditionType.READY, "False", reason) for reason in sorted(IN_FLIGHT)),
    ],
)
def test_what_needs_no_person_has_no_link(kind: str, status: str, reason: str) -> None:
    assert linked(kind, status, reason) == "it is so"


def test_a_long_message_is_cut_and_its_link_is_not() -> None:
    message = linked(ConditionType.READY, "False", Reason.APPLY_FAILED, "x" * MAX_MESSAGE)
    assert len(message) == MAX_MESSAGE
    assert message.endswith(f"…; see {PAGE}#applyfailed")
