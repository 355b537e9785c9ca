"""The table of known faults keeps up with the code: each can still be planted."""

from __future__ import annotations

from pathlib import Path

from tests.tools.mutants.__main__ import find_lost, judge
from tests.tools.mutants.faults import FAULTS

ROOT = Path(__file__).resolve().parents[3]


def test_every_fault_can_be_planted():
    assert find_lost(FAULTS, ROOT) == []
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_only_a_test_that_failed_catches_a_fault():
    fault = FAULTS[0]
    assert judge(fault, 1, "FAILED tests/x.py::test_y - assert\n", 1.0).verdict == "caught"
    assert judge(fault, 0, "3 passed\n", 1.0).verdict == "SURVIVED"
    for status, said in (
        (1, "ERROR tests/x.py::test_y - SyntaxError\n"),
        (2, "ERROR tests/x.py\n"),
        (5, "no tests ran\n"),
    ):
        assert judge(fault, status, said, 1.0).verdict == "BROKEN"
