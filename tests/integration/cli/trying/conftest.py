"""Runs of `outbox try` that end with the test."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.trying import PROGRAM, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Made by the first run of the module."""
    made: Path = tmp_path_factory.mktemp("cache")
    return made


@pytest.fixture
def trials(cache: Path) -> Iterator[Callable[..., Trial]]:
    made: list[Trial] = []

    def make(folder: Path | None = None, own_cache: Path | None = None, command: Sequence[str] = PROGRAM) -> Trial:
        # Not pytest's own folders: a socket's path is short, and root's server is another user.
        folder = folder or Path("/tmp") / f"outbox-try-{uuid.uuid4().hex[:8]}"
        made.append(Trial(folder, own_cache or cache, command))
        return made[-1]

    yield make
    for trial in made:
        trial.close()
        trial.out.unlink(missing_ok=True)
