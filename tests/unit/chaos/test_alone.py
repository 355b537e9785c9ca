"""Where no other process is there, a recovery counts from when the one that the tool starts is up."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tools.chaos.cases import Case, Target
from tests.tools.chaos.faults import Faults
from tests.tools.chaos.schedule import Fault, Kind
from tests.tools.chaos.victims import Victim
from tests.tools.ledger.account import Order

PAUSE = 0.5
UP_AFTER = 2.0


@pytest.mark.parametrize("others", [[], ["worker-2"]], ids=["alone", "beside another"])
def test_a_kill_of_the_only_process_counts_from_when_its_successor_is_up(tmp_path, others) -> None:
    done = []
    up_at = time.time() + UP_AFTER
    pods = SimpleNamespace(
        case=Case("a", "Ordered", Target.SQL, Order.TOTAL), alive=lambda: others,
        freeze=lambda _: done.append("frozen"), kill=lambda _, restart_after: done.append(restart_after),
        has_one_that_answers=lambda: time.time() >= up_at,
    )  # fmt: skip
    none: Any = SimpleNamespace(rabbitmq=None, kafka=None)
    faults = Faults(none, none, none, {"a": pods}, tmp_path / "journal")  # type: ignore[dict-item]
    pod: Any = SimpleNamespace(name="worker-1")
    victims: Any = SimpleNamespace(choose=lambda _: pod, look_at=lambda _, pod: Victim(pod, (0,)))
    faults._victims = victims

    struck = faults.strike(Fault(at=0, kind=Kind.KILL, case="a", seconds=0, choice=0.5, amount=PAUSE))

    assert done == ["frozen", PAUSE]
    assert (struck.counts_from >= up_at) == (not others)
