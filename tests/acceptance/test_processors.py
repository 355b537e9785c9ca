"""Processors on the real cluster, as a user sees them; the operator is a pod that the chart installed.

What happens is in `scenarios/`, a file for each subject; here they are started together and each is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.acceptance.scenarios import Scenarios, bad_input, conflict, deletion, lifecycle, ownership, source

if TYPE_CHECKING:
    from tests.acceptance.conftest import Rooms

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(560)]

scenarios = Scenarios.of(
    *(module.scenarios for module in (lifecycle, ownership, conflict, deletion, source, bad_input))
)


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest, rooms: Rooms) -> Scenarios:
    wanted = [name for item in request.session.items if (name := _scenario_of(item))]
    rooms.server.prepare(len(wanted))
    scenarios.start(wanted, rooms)
    return scenarios


def _scenario_of(item: Any) -> str:
    """Name the scenario of a selected test of this module."""
    if getattr(item, "originalname", "") != "test_scenario" or item.module.__name__ != __name__:
        return ""
    name: str = item.callspec.params["name"]
    return name


@pytest.mark.parametrize("name", scenarios.names)
def test_scenario(running: Scenarios, name: str):
    running.finish(name, within=540)
