"""The time of a batch, with few rows and with many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.tools.bench import growth
from tests.tools.bench.case import Case
from tests.tools.bench.growth import Grown

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate

_FEW, _MANY = 10_000, 1_000_000


def _candidates() -> list[Candidate]:
    return [
        Grown("1,000,000 rows behind the cursor", behind=_MANY),
        Grown("1,000,000 rows ahead of the cursor", ahead=_MANY),
        Grown("10,000 rows behind the cursor", behind=_FEW, baseline=True),
        Grown("10,000 rows ahead of the cursor", ahead=_FEW, baseline=True),
    ]


GROWTH = Case(
    name="growth",
    title="Mode Ordered over a table that grows",
    about=(
        "The time of a batch of 1000 messages that a SQL statement sums, with rows that were handled before (behind "
        "the cursor) or that wait (ahead of it). Compare A with 10,000 rows behind, B with 10,000 rows ahead: 1.00x "
        "means that the table's size costs nothing."
    ),
    candidates=_candidates,
    measure=growth.measure,
    figures=(growth.BATCH,),
)
