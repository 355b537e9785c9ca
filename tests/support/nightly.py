"""Variants of a test that only `make test-all` runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def at_night(*values: object) -> list[ParameterSet]:
    """Parameters of one more variant each, which by day would tell little that the others do not."""
    return [pytest.param(value, marks=pytest.mark.nightly) for value in values]
