"""Drivers as real processes, and a JVM that those of one file share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.spark import Drivers, SharedJvm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def shared_jvm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedJvm]:
    """For drivers that end by themselves; those that are killed have a JVM of their own."""
    jvm = SharedJvm(tmp_path_factory.mktemp("jvm"))
    yield jvm
    jvm.stop()


@pytest.fixture
def drivers(tmp_path: Path, shared_jvm: SharedJvm) -> Iterator[Drivers]:
    running = Drivers(tmp_path)
    yield running
    if any(driver.process.poll() is None for driver in running.started):
        shared_jvm.stop()
    running.stop()
