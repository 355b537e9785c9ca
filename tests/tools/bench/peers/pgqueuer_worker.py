"""PGQueuer with a function for each job. Arguments: database, file of numbers, batch size."""

from __future__ import annotations

import asyncio
import json
import sys

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.models import Job  # noqa: TC002 - PGQueuer reads the annotation

from tests.tools.bench.peers.numbers import NumbersFile


async def main(database: str, path: str, batch: int) -> None:
    """Work until it is ended."""
    connection = await asyncpg.connect(database)
    peer = PgQueuer.from_asyncpg_connection(connection)
    assert peer.queries is not None
    await peer.queries.install()
    numbers = NumbersFile(path)

    async def handle(job: Job) -> None:  # it must be a coroutine
        numbers.add(json.loads(job.payload or b"")["n"])

    peer.entrypoint("bench")(handle)
    print("ready", flush=True)
    await asyncio.gather(numbers.write_for_ever(), peer.run(batch_size=batch))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
