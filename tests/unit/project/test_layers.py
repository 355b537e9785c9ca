"""`make test` runs every folder that holds tests, but those that are run by hand."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
BY_HAND = {"keda"}
"""KEDA takes ten minutes to build: the page of contributors says how it is run."""


def test_the_test_command_names_every_folder_with_tests() -> None:
    with_tests = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
    (named,) = re.findall(r"layers=\(([^)]*)\)", (TESTS / "run.sh").read_text())
    assert {Path(folder).name for folder in named.split()} == with_tests - BY_HAND
    assert all(f"`tests/{folder}`" in (TESTS.parent / "CONTRIBUTING.md").read_text() for folder in BY_HAND)
