"""Which checkpoint row a call is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessorKey:
    """A processor's partition in one schema.

    Attributes:
        schema: where checkpoints, claims, leases and functions are (`source.schemaName`).
        processor_id: the processor.
        partition: 0 while nothing is partitioned.
        names: the key as arguments of a function; not to be changed.

    """

    schema: str
    processor_id: str
    partition: int = 0
    names: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Name the arguments once: each batch uses them."""
        object.__setattr__(self, "names", {"processor_id": self.processor_id, "partition": self.partition})

    @property
    def lock_name(self) -> str:
        """What the worker's transactions hold an advisory lock on, so that a next owner can find them."""
        return f"outbox {self.schema} {self.processor_id} {self.partition}"
