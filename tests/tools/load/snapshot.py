"""The cursor Snapshot under load: `python -m tests.tools.load.snapshot --rows 2000000 --writers 16 --seed 1`.

Writers are processes that store numbered messages under their key's lock, with open transactions, savepoints, rollbacks
and prepared transactions; another database's transaction stays open all the time. Workers are real processes, of an
Ordered and of a Partitioned processor; they are killed and replaced meanwhile. The ledger counts, for each processor,
messages lost, handled twice, and handled out of their key's commit order. Exit status 1 unless all are 0.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.servers.postgres import Servers, wait_until
from tests.support.worker import Workers, build_config
from tests.tools.load.producing import SCHEMA, Share, produce

if TYPE_CHECKING:
    from tests.support.servers.postgres import Database
    from tests.support.worker import Worker

KEYS = 200
KINDS: dict[str, dict[str, Any]] = {
    "ordered": {"mode": "Ordered"},
    "partitioned": {"mode": "Partitioned", "partitions": {"count": 4}},
}
LEDGER = """
WITH mine AS (SELECT h.*, lag(h.number) OVER (PARTITION BY h.key ORDER BY h.n) AS before
              FROM handled AS h WHERE h.processor = %(processor)s)
SELECT (SELECT count(*) FROM outbox.messages),
       count(*),
       (SELECT count(*) FROM outbox.messages AS m
        WHERE NOT EXISTS (SELECT 1 FROM handled AS h
                          WHERE h.processor = %(processor)s AND h.message_id = m.message_id)),
       count(*) - count(DISTINCT m.message_id),
       count(*) FILTER (WHERE m.number <> coalesce(m.before, 0) + 1)
FROM mine AS m
"""


@dataclass(frozen=True)
class Line:
    """What became of one processor's messages."""

    processor: str
    stored: int
    handled: int
    lost: int
    doubled: int
    reordered: int

    @property
    def clean(self) -> bool:
        """Each message once, each key in order."""
        return self.stored == self.handled and not (self.lost or self.doubled or self.reordered)


@dataclass(frozen=True)
class Result:
    """The ledger, and how long writing and the rest of handling took, in seconds."""

    lines: list[Line]
    transactions: int
    kills: int
    writing: float
    behind: float


class Crew:
    """The workers of one processor: two processes, of which one is killed now and then."""

    def __init__(self, workers: Workers, database: Database, kind: str, cursor: str) -> None:
        statement = (
            f"INSERT INTO handled (processor, message_id, key, number) SELECT '{kind}', message_id, partition_key, "
            "(data->>'number')::bigint FROM batch ORDER BY position"
        )
        self._workers, self._uri, self._kind = workers, database.uri(), kind
        self._config = build_config(
            database,
            {"sql": {"statement": statement}},
            processor_id=kind,
            resource={"name": kind, "uid": f"uid-{kind}"},
            source={"cursor": cursor},
            delivery={"leaseDuration": "3s", **KINDS[kind]},
        )
        self.running: list[Worker] = [self._start(), self._start()]

    def _start(self) -> Worker:
        return self._workers.start(self._config, self._uri)

    def kill_one(self, chance: random.Random) -> None:
        victim = self.running.pop(chance.randrange(len(self.running)))
        victim.kill()
        self.running.append(self._start())


def run(
    database: Database, directory: Path, *, rows: int, writers: int, seed: int, most: int, cursor: str = "Snapshot"
) -> Result:
    """Produce, handle, kill, and count."""
    chance = random.Random(seed)
    admin = database.direct()
    admin.execute(SCHEMA)
    admin.execute("INSERT INTO keys SELECT 'k' || n FROM generate_series(0, %s) AS n", (KEYS - 1,))
    stranger = database.server.connect("postgres", autocommit=False)
    stranger.execute("SELECT pg_current_xact_id()")
    workers, kills, began = Workers(directory), 0, time.monotonic()
    try:
        crews = [Crew(workers, database, kind, cursor) for kind in KINDS]
        shares = [
            Share(database.uri(), f"writer-{n}", seed * 1000 + n, rows // writers + 1, KEYS, most)
            for n in range(writers)
        ]
        with ProcessPoolExecutor(writers) as pool:
            writing = [pool.submit(produce, share) for share in shares]
            while wait(writing, timeout=2 + 8 * chance.random()).not_done:
                crews[kills % 2].kill_one(chance)
                kills += 1
            transactions = sum(each.result() for each in writing)
        written = time.monotonic()
        wait_until(lambda: _all_handled(admin), "everything is handled", 600 + rows / 1000)
        caught_up = time.monotonic()
        lines = [_count(admin, kind) for kind in KINDS]
    finally:
        workers.stop()
        stranger.close()
    return Result(lines, transactions, kills, written - began, caught_up - written)


def _all_handled(admin: Any) -> bool:
    time.sleep(0.2)
    (stored,) = admin.execute("SELECT count(*) FROM outbox.messages").fetchone()
    handled = dict(admin.execute("SELECT processor, count(*) FROM handled GROUP BY processor").fetchall())
    return all(handled.get(kind, 0) >= stored for kind in KINDS)


def _count(admin: Any, kind: str) -> Line:
    admin.execute("SET work_mem = '256MB'")
    admin.execute("CREATE INDEX IF NOT EXISTS handled_by_message ON handled (processor, message_id)")
    return Line(kind, *admin.execute(LEDGER, {"processor": kind}).fetchone())


def main() -> int:
    """Run once and print the ledger."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.load.snapshot", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--most", type=int, default=200, help="messages of one key in one transaction (%(default)s)")
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.rows} rows, {given.writers} writers", flush=True)
    servers = Servers()
    try:
        with servers.database() as database, tempfile.TemporaryDirectory(prefix="outbox-load-") as directory:
            result = run(
                database, Path(directory), rows=given.rows, writers=given.writers, seed=given.seed, most=given.most
            )
    finally:
        servers.stop()
    print(f"{result.transactions} transactions in {result.writing:.0f} s, all handled {result.behind:.1f} s later, "
          f"{result.kills} workers killed")  # fmt: skip
    print(f"{'processor':12} {'stored':>9} {'handled':>9} {'lost':>6} {'doubled':>8} {'reordered':>10}")
    for line in result.lines:
        print(
            f"{line.processor:12} {line.stored:9} {line.handled:9} {line.lost:6} {line.doubled:8} {line.reordered:10}"
        )
    return 0 if all(line.clean for line in result.lines) else 1


if __name__ == "__main__":
    sys.exit(main())
