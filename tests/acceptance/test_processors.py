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
    conflict,
    deletion,
    failing,
    lifecycle,
    modes,
    moving,
    ownership,
    receiving,
    source,
    unheard,
)

if TYPE_CHECKING:
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
        )
    )
)


@pytest.mark.parametrize("name", scenarios.names)
def test_scenario(running: Running, name: str):
    assert running.finish(name, within=540)
