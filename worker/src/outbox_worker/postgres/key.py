"""Which checkpoint row a call is about."""

from __future__ import annotations

from dataclasses import dataclass


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
