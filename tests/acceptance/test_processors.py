"""Processors on the real cluster, as a user sees them; the operator is a pod that the chart installed.

What happens is in `scenarios/`, a file for each subject; here they are started together and each is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.acceptance.scenarios import (
    Scenarios,
    bad_input,
    belief,
    brokers,
    conflict,
    deletion,
    failing,
    lifecycle,
    modes,
    moving,
    ownership,
    receiving,
    sharing,
    source,
    unheard,
)

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms
    from tests.acceptance.scenarios import Running

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]

scenarios = Scenarios.of(
    *(
        module.scenarios
        for module in (
            lifecycle,
            ownership,
            conflict,
            deletion,
            source,
            bad_input,
            moving,
            modes,
            failing,
            belief,
            unheard,
            receiving,
            sharing,
            brokers,
        )
    )
)


@pytest.mark.parametrize("name", scenarios.names)
def test_scenario(running: Running, name: str):
    assert running.finish(name, within=540)


@pytest.mark.calm
def test_a_worker_that_says_something_else_each_time_keeps_nobody_busy(rooms: Rooms):
    """A scenario of its own: on a busy machine pods are ready and not ready, and each time its words are looked at."""
    assert belief.count_changes_while_a_worker_lies(rooms) <= 6
