"""Messages of some megabytes, and what a process that handles them has in memory at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.processes import memory_mb

if TYPE_CHECKING:
    from tests.support.worker import Outbox, Worker

SIZE, COUNT = 4 << 20, 40
MOST = 170
"""Megabytes that a process must stay below. It has 60 of its own; all messages are 160, and a result as much again."""
HANDLER = """
import os, pathlib, uuid
def handle(batch, connection):
    if pathlib.Path("refuse").exists():
        raise RuntimeError("not now")
    name = str(uuid.uuid4())
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO handled (message_id, total, pod) VALUES (%s, %s, %s)",
            [(m.message_id, len(m.data), name) for m in batch],
        )
"""
"""Inserts into `handled`, with a name for each batch; refuses all while there is a file `refuse`."""


def produce(outbox: Outbox) -> list[str]:
    """Store messages of SIZE bytes, not compressed; return their ids."""
    outbox.connection.execute("ALTER TABLE outbox.messages ALTER data SET STORAGE EXTERNAL")
    outbox.connection.execute(
        "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n %% 5, 'message-' || n, 'T', to_jsonb(repeat('x', %s)) "
        "FROM generate_series(1, %s::int) AS n",
        (SIZE - 2, COUNT),
    )
    return [f"message-{n}" for n in range(1, COUNT + 1)]


def peak(worker: Worker) -> float:
    """Megabytes that the process had in memory at most."""
    most = memory_mb(worker.process.pid, "peak")
    print(f"peak of {worker.directory.name}: {most:.0f} MB")
    return most
