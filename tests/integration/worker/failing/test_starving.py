"""Failing messages beside healthy ones: the healthy ones are hardly later. Real processes; see
`tests.tools.load.failing`.

Each case is compared with a control without failing messages, right before it on the same machine.
"""

from __future__ import annotations

import pytest

from tests.tools.load.failing import Case, Run, find_broken

pytestmark = pytest.mark.calm

SECONDS = 4.0


def run(case, database, directory, *, failing):
    measured = Run(database, directory, case)
    try:
        return measured.stream(SECONDS, failing=failing)
    finally:
        measured.workers.stop()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("partitioned", "python", "Key", "DeadLetter", "mixed"), id="partitioned, mixed"),
        pytest.param(
            Case("partitioned", "sql", "Nothing", "Skip", "20"),
            id="partitioned, sql, 20 in a row",
            marks=pytest.mark.nightly,
        ),
        pytest.param(Case("ordered", "python", "Key", "Stop", "120"), id="ordered by key, 120 in a row"),
        pytest.param(
            Case("ordered", "sql", "Nothing", "DeadLetter", "1000"),
            id="ordered, sql, 1,000 in a row",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            Case("partitioned", "python", "Key", "DeadLetter", "20", "AtLeastOnce"), id="partitioned, at least once"
        ),
    ],
)
def test_failing_messages_keep_healthy_ones_waiting_for_seconds_at_most(case, servers, tmp_path):
    lines = []
    for failing in (False, True):
        with servers.database() as database:
            (tmp_path / str(failing)).mkdir()
            lines.append(run(case, database, tmp_path / str(failing), failing=failing))
    assert find_broken("stream", *lines) == [], f"{lines[0]}; {lines[1]}"
