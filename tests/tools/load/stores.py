"""Measures what storing and reading a checkpoint costs while an old snapshot keeps every dead version of its row.

python -m tests.tools.load.stores [--stores 100000]
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import fmean, median, quantiles
from typing import TYPE_CHECKING
from uuid import uuid4

from tests.support.database.contract import own, store
from tests.support.servers.postgres import Servers

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = 10_000
READ = "SELECT * FROM outbox.processor_checkpoints WHERE processor_id = 'orders' AND partition = 0"


def time_each(calls: int, call: Callable[[], object]) -> str:
    """Call so often; say the times in microseconds."""
    times = []
    for _ in range(calls):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return f"median {median(times):5.0f} mean {fmean(times):5.0f} p99 {quantiles(times, n=100)[-1]:6.0f} us"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", type=int, default=100_000, help="while the snapshot is held")
    given = parser.parse_args()
    servers = Servers()
    try:
        with servers.database() as database:
            connection, token = database.direct(), str(uuid4())
            connection.execute("SET synchronous_commit = off")
            owner = (own(database, token, lease="10 hours"), token)
            store(connection, (7, 0), owner=owner)
            connection.execute("ANALYZE outbox.processor_checkpoints")
            position = 0

            def one() -> None:
                nonlocal position
                if store(connection, (7, position + 1), (7, position), owner=owner) != 1:
                    raise AssertionError(position)
                position += 1

            print(f"free: store {time_each(STEP, one)}", flush=True)
            stranger = database.direct(autocommit=False)
            stranger.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            stranger.execute("SELECT 1")
            for held in range(STEP, given.stores + 1, STEP):
                stores = time_each(STEP, one)
                reads = time_each(20, lambda: connection.execute(READ).fetchone())
                row = connection.execute("SELECT pg_total_relation_size('outbox.processor_checkpoints')").fetchone()
                size = row[0] // 1024 if row else 0
                print(f"{held:7} dead: store {stores}   read {reads}   {size} kB", flush=True)
            stranger.close()
            return 0
    finally:
        servers.stop()


if __name__ == "__main__":
    sys.exit(main())
