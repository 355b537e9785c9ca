"""What rounds leave is added up, and printed; a violation of one is one of all."""

from __future__ import annotations

import json
from dataclasses import asdict

from tests.tools.chaos.cases import CASES
from tests.tools.chaos.faults import Struck
from tests.tools.chaos.recovery import Recovery
from tests.tools.chaos.result import Result, add_up, build_result, from_json
from tests.tools.chaos.schedule import Fault, Kind
from tests.tools.chaos.summary import format_result
from tests.tools.chaos.verdict import Verdict
from tests.tools.ledger.account import Account

SQL, RABBITMQ = CASES[0], CASES[2]


def make_result(case=SQL, *, seconds=2.0, violations=(), **fields) -> Result:
    fault = Fault(1.0, Kind.FREEZE_IN_BATCH, case.name, 4.0, 0.5, 0.0)
    struck = [Struck(fault, 100.0, 104.0, 100.0, expired=True), Struck(fault, 110.0, 114.0, 110.0, harmless=True)]
    account = Account(case.name, 10, 12, 0, 2, 0)
    verdict = Verdict(case, account, violations, moved_back=len(violations))
    recoveries = [Recovery(Kind.FREEZE_IN_BATCH, case.name, seconds)]
    return build_result([verdict], struck, recoveries, overtaken=4, overlooked=(), **fields)


def test_rounds_are_added_up() -> None:
    total = add_up([make_result(seconds=2.0), make_result(RABBITMQ, seconds=6.0)])
    assert [(case.target, case.doubled_allowed, case.faults) for case in total.cases] == [
        ("sql", False, 2), ("rabbitmq", True, 2),
    ]  # fmt: skip
    kind = total.kinds[Kind.FREEZE_IN_BATCH]
    assert (kind.struck, kind.idle, kind.seconds) == (4, 2, [2.0, 6.0])
    assert (total.frozen, total.expired, total.overtaken) == (2, 2, 8)
    assert total.status == 0


def test_a_violation_of_one_round_is_one_of_all() -> None:
    total = add_up([make_result(), make_result(RABBITMQ, violations=("message 7 is lost",))])
    assert total.status == 1
    assert "VIOLATION ordered-rabbitmq: message 7 is lost" in format_result(total)
    assert Result(overlooked=["a loss"]).status == 1


def test_what_was_not_seen_is_no_proof_and_a_violation_is_worse() -> None:
    blind = make_result(missing=["ordered-sql: no sample of a lease"])
    assert blind.status == 2
    assert "MISSING ordered-sql: no sample of a lease" in format_result(add_up([make_result(), blind]))
    assert add_up([blind, make_result(violations=("message 7 is lost",))]).status == 1


def test_a_result_survives_its_file() -> None:
    result = make_result(violations=("wrong",))
    assert from_json(json.loads(json.dumps(asdict(result)))) == result


def test_it_is_printed_with_a_line_for_each_case_and_each_kind() -> None:
    lines = format_result(add_up([make_result(seconds=2.0), make_result(RABBITMQ, seconds=6.0)]))
    (case,) = [line.split() for line in lines if line.startswith("Ordered") and "rabbitmq" in line]
    assert case[1:] == ["rabbitmq", "10", "12", "0", "2", "(allowed)", "0", "0", "2", "6.00", "s", "6.00", "s"]
    (kind,) = [line.split() for line in lines if line.startswith("freeze in mid-batch")]
    assert kind[3:] == ["4", "2", "2", "0", "4.00", "s", "6.00", "s"]
    assert any(line.split()[-2:] == ["-", "-"] for line in format_result(make_result(seconds=None))), (
        "none was measured"
    )
    assert "Leases that ended in mid-batch: 2 of 2 frozen there." in lines
