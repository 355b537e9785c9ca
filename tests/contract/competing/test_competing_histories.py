"""Random histories of consumers against a model: nothing is lost, and transactional effects happen once.

Consumers take, complete with effects in one transaction, fail, beat, hand back, die, freeze and wake; leases lapse;
producers commit late or roll back; tables are rotated. More of it: OUTBOX_HISTORIES=200 OUTBOX_SEED=7 pytest FILE.
"""

from __future__ import annotations

import os
import random
from datetime import timedelta

import pytest

from outbox_core.errors import HandlerError
from outbox_core.processor.claimed_batch import ClaimedBatch, RefusalAction, RefusalDecision
from outbox_core.report import ResourceRef
from outbox_core.spec import Competing, StartFrom
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.reading.read_range import ReadRange
from tests.support.database.consuming import defer, look, maintain
from tests.support.servers.postgres import build_source

KEY = ProcessorKey("outbox", "orders")
HOUR = timedelta(hours=1)
NOW = timedelta(0)
HISTORIES = int(os.environ.get("OUTBOX_HISTORIES", "2"))
SEED = int(os.environ.get("OUTBOX_SEED", "20240601"))
STEPS = 120


class History:
    """Consumers, producers and what the model knows."""

    def __init__(self, database, seed, queue):
        self.chance = random.Random(seed)
        self.database = database
        self.queue = queue
        self.table = f"queue_{queue}" if queue else "messages"
        self.settings = Competing(queue=queue)
        self.look = database.direct()
        self.look.execute("CREATE TABLE IF NOT EXISTS effects (message_id text)")
        self.look.execute("TRUNCATE effects")
        assert ownership.claim(self.look, KEY, ResourceRef(cluster="c", namespace="n", name="a", uid="u1")).granted
        if queue:
            competing.ensure_queue(self.look, "outbox", queue, create=True)
        self.takers = [self.build_taker(number) for number in range(3)]
        consumer = competing.Consumer("", "", "u1", HOUR)
        assert competing.join(self.look, KEY, consumer, build_source(), self.settings, StartFrom()) is True
        self.hands: list[ClaimedBatch | None] = [None] * 3
        self.frozen: list[tuple[int, ClaimedBatch]] = []
        self.producers = {}
        self.expected: set[str] = set()
        self.dead: set[str] = set()
        self.number = 0

    def build_taker(self, number):
        consumer = competing.Consumer(f"c{number}", f"pod-{number}", "u1", HOUR)
        return competing.BatchTaker(KEY, consumer, build_source(), self.settings, self.chance.randint(1, 7))

    def run(self):
        acts = [self.produce] * 4 + [self.take] * 6 + [self.complete] * 5 + [
            self.end_producer, self.end_producer, self.fail, self.fail, self.beat, self.hand_back, self.die,
            self.freeze, self.wake, self.lapse, self.rotate, self.part,
        ]  # fmt: skip
        for _ in range(STEPS):
            self.chance.choice(acts)()
            assert self.doubled() == []
        self.settle()

    def produce(self):
        """In a transaction that may stay open for long."""
        key = self.chance.randrange(3)
        if key not in self.producers:
            self.producers[key] = (self.database.direct(autocommit=False), [])
        connection, ids = self.producers[key]
        for _ in range(self.chance.randint(1, 6)):
            self.number += 1
            columns, values = "", ""
            if self.queue:
                columns = ", priority, deliver_after"
                delay = "clock_timestamp() + interval '1 ms'" if self.chance.random() < 0.2 else "NULL"
                values = f", {self.chance.choice([0, 5, 9])}, {delay}"
            connection.execute(
                f"INSERT INTO outbox.{self.table} (message_id, message_type, data{columns}) "
                f"VALUES (%s, 't', '{{}}'{values})",
                (f"m{self.number}",),
            )
            ids.append(f"m{self.number}")

    def end_producer(self):
        if not self.producers:
            return
        connection, ids = self.producers.pop(self.chance.choice(sorted(self.producers)))
        if self.chance.random() < 0.8:
            connection.commit()
            self.expected.update(ids)
        else:
            connection.rollback()
        connection.close()

    def take(self):
        number = self.chance.randrange(3)
        if self.hands[number] is None:
            by = self.takers[number]
            found = look(self.look, by) or by.claim_next(self.look)
            self.hands[number] = found if isinstance(found, ClaimedBatch) else None

    def apply(self, number, claimed):
        """Effects and completion in one transaction, of all that is left or of its beginning."""
        by = self.takers[number]
        most = self.chance.choice([None, 1, 2])
        with self.database.direct(autocommit=False) as connection:
            messages = by.reader.fetch(connection, ReadRange.of(claimed, limit=most))
            upto = messages[-1].checkpoint if most is not None and len(messages) == most else claimed.upto
            for message in messages:
                connection.execute("INSERT INTO effects VALUES (%s)", (message.message_id,))
            if not by.complete(connection, claimed, upto, len(messages)):
                connection.rollback()
                return None
            connection.commit()
        return upto

    def complete(self):
        number = self.chance.randrange(3)
        if (claimed := self.hands[number]) is not None:
            upto = self.apply(number, claimed)
            self.hands[number] = None
            if upto is not None and upto < claimed.upto:
                self.takers[number].hand_back(self.look)  # the rest is anybody's

    def fail(self):
        number = self.chance.randrange(3)
        claimed, by = self.hands[number], self.takers[number]
        if claimed is None:
            return
        messages = by.reader.fetch(self.look, ReadRange.of(claimed, limit=1))
        action = self.chance.choice([RefusalAction.RETRY, RefusalAction.RETRY, RefusalAction.DEAD_LETTER])
        if defer(self.look, by, claimed, messages[0], RefusalDecision(action, 1), HandlerError("no"), NOW):
            if action is RefusalAction.DEAD_LETTER:
                self.dead.add(messages[0].message_id)
            by.hand_back(self.look)
        self.hands[number] = None

    def beat(self):
        number = self.chance.randrange(3)
        if (claimed := self.hands[number]) is not None:
            self.takers[number].renew(self.look, claimed)

    def hand_back(self):
        number = self.chance.randrange(3)
        self.takers[number].hand_back(self.look)
        self.hands[number] = None

    def die(self):
        """In the middle of a transaction: its effects are gone, its batch lapses later. Another process comes."""
        number = self.chance.randrange(3)
        self.hands[number] = None

    def freeze(self):
        number = self.chance.randrange(3)
        if (claimed := self.hands[number]) is not None:
            self.frozen.append((number, claimed))
            self.hands[number] = None

    def wake(self):
        """It completes what it had, or is told that it is another's."""
        if self.frozen:
            number, claimed = self.frozen.pop(self.chance.randrange(len(self.frozen)))
            self.apply(number, claimed)

    def lapse(self):
        self.look.execute(
            "UPDATE outbox.competing_batches SET expires_at = clock_timestamp() WHERE id %% 2 = %s",
            (self.chance.randrange(2),),
        )

    def rotate(self):
        maintain(self.look, self.settings)
        if self.queue:
            self.look.execute("SELECT outbox.rotate_queue('orders', '0', 0)")

    def part(self):
        """The ids go on to the next child, as after a thousand batches."""
        name = self.chance.choice(["competing_batch_ids", "competing_dispatch_position_ids"])
        self.look.execute(f"SELECT setval('outbox.{name}', nextval('outbox.{name}') + 512)")

    def settle(self):
        """Everybody dies; one who is left does all the rest."""
        while self.producers:
            self.end_producer()
        self.look.execute("UPDATE outbox.competing_batches SET expires_at = clock_timestamp()")
        by = self.takers[0]
        empty = 0
        while empty < 3:
            found = look(self.look, by) or by.claim_next(self.look)
            if isinstance(found, ClaimedBatch):
                empty = 0
                while found is not None:
                    upto = self.apply(0, found)
                    assert upto is not None
                    found = None
                    by.hand_back(self.look)
            else:
                empty = 0 if found.moved else empty + 1
        handled = {row[0] for row in self.look.execute("SELECT message_id FROM effects")}
        assert handled == self.expected - self.dead
        assert self.doubled() == []
        letters = [row[0] for row in self.look.execute("SELECT message_id FROM outbox.dead_letters")]
        assert sorted(letters) == sorted(self.dead)

    def doubled(self):
        return self.look.execute("SELECT message_id FROM effects GROUP BY 1 HAVING count(*) > 1").fetchall()


@pytest.mark.parametrize("queue", [None, "jobs"], ids=["outbox", "queue"])
@pytest.mark.parametrize("number", range(HISTORIES))
def test_nothing_is_lost_and_effects_happen_once(servers, number, queue):
    seed = SEED + number
    print(f"OUTBOX_SEED={seed} OUTBOX_HISTORIES=1")
    with servers.database() as database:
        History(database, seed, queue).run()
