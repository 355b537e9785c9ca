"""Which checkpoint row a call is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessorKey:
    """A processor's partition in one schema.

    Attributes:
        schema: where checkpoints, claims, leases and functions are (`source.schemaName`).
        processor_id: the processor.
        partition: 0 while nothing is partitioned.

    """

    schema: str
    processor_id: str
    partition: int = 0

    @property
    def names(self) -> dict[str, Any]:
        """The key as arguments of a function."""
        return {"processor_id": self.processor_id, "partition": self.partition}

    @property
    def lock_name(self) -> str:
        """What the worker's transactions hold an advisory lock on, so that a next owner can find them."""
        return f"outbox {self.schema} {self.processor_id} {self.partition}"
