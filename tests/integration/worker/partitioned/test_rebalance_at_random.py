"""Replicas come, leave, freeze and are killed while the number of partitions changes again and again: a ledger by key.

`OUTBOX_CHANGES_SEED` repeats a schedule, `OUTBOX_CHANGES_SECONDS` makes it longer (600 was run for the record).
Producers take the keys' locks before they insert, as the cursor Snapshot asks of them: then a key's positions are its
commit order. A stranger's transaction is open all the time: it would hold the other cursor's bound back.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.divided import start
from tests.support.servers.postgres import wait_until

if TYPE_CHECKING:
    import psycopg

    from tests.support.servers.postgres import Database
    from tests.support.worker import Outbox, Worker, Workers

SECONDS = float(os.environ.get("OUTBOX_CHANGES_SECONDS", "12"))
pytestmark = [pytest.mark.timeout(SECONDS + 240), pytest.mark.nightly]
KEYS = 60
ORDER = {"TransactionOrder": "m.transaction_id, m.position", "Snapshot": "m.position"}
MOST_WAITING = 300


class Producers:
    """Several writers at once: transactions that stay open, that are rolled back, that take their id early."""

    def __init__(self, database: Database, seed: int, count: int = 4) -> None:
        self._database = database
        self._done = threading.Event()
        self._threads = [
            threading.Thread(target=self._write, args=(n, random.Random(f"{seed} {n}"))) for n in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()

    @staticmethod
    def _lag(connection: psycopg.Connection[Any]) -> int:
        """How many messages wait: a schedule is about changes, not about a backlog."""
        row = connection.execute("SELECT (SELECT count(*) FROM outbox.messages) - (SELECT count(*) FROM handled)")
        (waiting,) = row.fetchone() or (0,)
        connection.rollback()
        return int(waiting)

    def _write(self, number: int, chance: random.Random) -> None:
        written = 0
        with self._database.direct(autocommit=False) as connection:
            while not self._done.is_set():
                if self._lag(connection) > MOST_WAITING:
                    self._done.wait(0.1)
                    continue
                if chance.random() < 0.3:
                    connection.execute("SELECT pg_current_xact_id()")
                    self._done.wait(chance.uniform(0, 0.3))
                written = self._insert(connection, chance, number, written)
                self._done.wait(chance.expovariate(30))
                if chance.random() < 0.1:
                    connection.rollback()
                else:
                    connection.commit()

    @staticmethod
    def _insert(connection: psycopg.Connection[Any], chance: random.Random, number: int, written: int) -> int:
        keys = [chance.randrange(KEYS) if chance.random() < 0.9 else None for _ in range(chance.randrange(1, 12))]
        connection.execute(
            "SELECT pg_advisory_xact_lock(key) FROM unnest(%s::int[]) AS key",
            (sorted({key for key in keys if key is not None}),),
        )
        for key in keys:
            written += 1
            connection.execute(
                "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
                "VALUES (%s, %s, 't', '{\"total\": 0}')",
                (None if key is None else f"key-{key}", f"{number}-{written}"),
            )
        return written


@dataclass
class Deployment:
    """What an operator would do with its pods, in a hurry: replicas of one or two generations, killed at any moment."""

    outbox: Outbox
    workers: Workers
    chance: random.Random
    cursor: str
    count: int = 4
    generation: int = 1
    changes: int = 0
    kills: int = 0
    live: list[Worker] = field(default_factory=list)
    frozen: list[tuple[float, Worker]] = field(default_factory=list)

    def add(self) -> None:
        pod = f"pod-{len(self.workers.started)}"
        target = start(
            self.outbox, self.workers, pod, count=self.count, generation=self.generation,
            source={"cursor": self.cursor},
        )  # fmt: skip
        self.live.append(target)

    def act(self) -> None:
        """One event of the schedule."""
        what = self.chance.choice(["kill", "kill", "stop", "freeze", "add", "change", "change", "change"])
        if what == "change":
            self.count = self.chance.choice([n for n in (2, 3, 4, 5, 8) if n != self.count])
            self.generation += 1
            self.changes += 1
        elif what == "freeze" and len(self.live) > 1:
            worker = self.live.pop(self.chance.randrange(len(self.live)))
            worker.send(signal.SIGSTOP)
            self.frozen.append((time.monotonic() + self.chance.uniform(0.5, 4.0), worker))
        elif what in ("kill", "stop") and self.live:
            worker = self.live.pop(self.chance.randrange(len(self.live)))
            self.kills += 1
            worker.kill() if what == "kill" else worker.terminate()
        if what == "change" or len(self.live) < 2 or (what == "add" and len(self.live) < 3):
            self.add()
        while len(self.live) > 4:  # a rollout takes the oldest away
            self.live.pop(0).terminate()

    def is_as_asked(self) -> bool:
        row = self.outbox.connection.execute(
            "SELECT partition_count, next_count FROM outbox.processor_partitions"
        ).fetchone()
        return row == (self.count, None)

    def thaw(self, *, everyone: bool = False) -> None:
        """Let go on who has been frozen for long enough: as a former owner, or of a former number."""
        for entry in list(self.frozen):
            if everyone or entry[0] < time.monotonic():
                self.frozen.remove(entry)
                entry[1].send(signal.SIGCONT)
                self.live.append(entry[1])


def ledger(outbox: Outbox, order: str) -> dict[str, int]:
    """Count what must be 0: messages lost, effects doubled, keys handled in another order than the cursor's."""
    rows = outbox.connection.execute(
        f"SELECT m.message_id, coalesce(m.partition_key, m.message_id) FROM outbox.messages m ORDER BY {order}"
    ).fetchall()
    handled = outbox.handled()
    known = dict(rows)
    expected, got = defaultdict(list), defaultdict(list)
    for message_id, key in rows:
        expected[key].append(message_id)
    for message_id in handled:
        got[known[message_id]].append(message_id)
    return {
        "lost": len(known.keys() - set(handled)),
        "doubled": len(handled) - len(set(handled)),
        "out of order": sum(expected[key] != got[key] for key in expected),
    }


@pytest.mark.parametrize("cursor", ORDER)
def test_a_ledger_by_key_while_everything_changes(outbox, workers, cursor):
    seed = int(os.environ.get("OUTBOX_CHANGES_SEED") or secrets.randbits(32))
    print(f"OUTBOX_CHANGES_SEED={seed} OUTBOX_CHANGES_SECONDS={SECONDS:g}")
    deployment = Deployment(outbox, workers, random.Random(seed), cursor)
    deployment.add()
    stranger = outbox.database.server.connect("postgres", autocommit=False)
    if cursor == "Snapshot":
        stranger.execute("SELECT pg_current_xact_id()")  # holds the bound of the other cursor from beginning to end
    producers = Producers(outbox.database, seed)
    try:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            deployment.act()
            calm = deployment.chance.random() < 0.5
            pause = time.monotonic() + deployment.chance.uniform(0.1, 2.5) + (8 if calm else 0)
            while time.monotonic() < pause and not (calm and deployment.is_as_asked()):
                deployment.thaw()
                time.sleep(0.02)
    finally:
        producers.stop()
    deployment.thaw(everyone=True)
    deployment.add()

    total = outbox.connection.execute("SELECT count(*) FROM outbox.messages").fetchone()[0]
    wait_until(lambda: len(outbox.handled()) >= total, f"{total} messages handled", 60)
    wait_until(deployment.is_as_asked, f"{deployment.count} partitions at the end", 60)
    made = outbox.connection.execute("SELECT count(*) FROM outbox.audit_log").fetchone()[0]
    print(f"{total} messages, {deployment.changes} changes asked for, {made} made, {deployment.kills} processes ended")
    print(f"{cursor}: {ledger(outbox, ORDER[cursor])}")
    assert ledger(outbox, ORDER[cursor]) == {"lost": 0, "doubled": 0, "out of order": 0}
    stranger.close()
    conflicts = outbox.connection.execute("SELECT count(*) FROM outbox.processor_conflicts WHERE code <> 4").fetchone()
    assert conflicts == (0,), "nobody was told that somebody else changed a checkpoint"
