"""What a planted fault is: text that stands in a file exactly once, and what takes its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SQL: Final = "sql/functions"
CORE: Final = "worker/src/outbox_core"
WORKER: Final = "worker/src/outbox_worker"
OPERATOR: Final = "operator/src/outbox_operator"


@dataclass(frozen=True, slots=True)
class Edit:
    """Text of a file, and what takes its place."""

    path: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in words, how it is made, and pytest's arguments that choose the tests for it."""

    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


def fault(name: str, path: str, old: str, new: str, *tests: str) -> Fault:
    """Return a fault that is made by one edit."""
    return Fault(name, (Edit(path, old, new),), tests)
