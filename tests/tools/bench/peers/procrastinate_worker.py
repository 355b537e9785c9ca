"""Procrastinate with a function for each job. Arguments: database, file of numbers, concurrency."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from procrastinate import App, PsycopgConnector

from tests.tools.bench.peers.numbers import NumbersFile


async def main(database: str, path: str, concurrency: int) -> None:
    """Work until it is ended."""
    app = App(connector=PsycopgConnector(conninfo=database, min_size=4, max_size=concurrency + 2))
    numbers = NumbersFile(path)

    async def handle(n: int, **_: Any) -> None:  # it must be a coroutine
        numbers.add(n)

    app.task(name="bench")(handle)
    async with app.open_async():
        await app.schema_manager.apply_schema_async()
        print("ready", flush=True)
        worker = app.run_worker_async(concurrency=concurrency, delete_jobs="always", install_signal_handlers=False)
        await asyncio.gather(numbers.write_for_ever(), worker)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
