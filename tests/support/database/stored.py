"""What is stored, through the product's adapter, where it must be there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox_worker.postgres.progress import checkpoints

if TYPE_CHECKING:
    import psycopg

    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.postgres.key import ProcessorKey


def stored_pair(connection: psycopg.Connection[Any], key: ProcessorKey) -> Checkpoint:
    """The pair of the row."""
    stored = checkpoints.load(connection, key)
    assert stored is not None
    return stored.pair
