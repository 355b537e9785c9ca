"""Variants of a test that only `make test-all` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _pytest.mark import ParameterSet


def at_night(*values: object) -> list[ParameterSet]:
    """Parameters of one more variant each, which by day would tell little that the others do not."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]


def by_day(parameters: Sequence[ParameterSet], *ids: str) -> list[ParameterSet]:
    """The parameters, of which `make test` runs only those with these ids: the others tell little that these do not."""
    assert {each.id for each in parameters} >= set(ids), f"some of {ids} are no parameters"
    return [
        each if each.id in ids else pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.nightly])
        for each in parameters
    ]
