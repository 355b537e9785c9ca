"""The engine over feeds in memory: two processes, producers, faults at any step; no message is lost or overtaken.

Steps, handling and decisions are the product's. In memory are the database, with the feeds that the contract suite
accepts (`tests/contract/test_feeds.py`), the target and the clock.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from typing_extensions import override

from outbox_core.config import ProcessorConfig
from outbox_core.errors import HandlerError, OutboxError, TransientError
from outbox_core.ports import InTransaction, OutsideTransaction, PipelinedTarget
from outbox_core.processor import outcomes
from outbox_core.processor.lifecycle import decide_next
from outbox_core.processor.state import Policy, initial_state, lease_of
from outbox_core.progress.numbering import Numbering, list_numbers
from outbox_core.report import Reason
from outbox_core.spec import Blocks, Guarantee
from outbox_worker.engine.effects import Effects
from outbox_worker.engine.handling import Handling
from outbox_worker.engine.steps import Steps, steps_of_an_owner
from outbox_worker.engine.stopped_steps import StoppedSteps
from outbox_worker.engine.throttle import Throttle
from tests.support.feeds.memory import LostError, MemoryConnection, MemoryDatabase, MemoryProducer, MemoryRunner, key_of
from tests.support.feeds.memory_feeds import MemoryFeed, MemoryHeldFeed, MemorySettling, MemoryUnit
from tests.support.worker import SQL_TARGET, build_config

MESSAGES = 1000
LIMIT = 10
KEYS = 7
FAR = 1e9
"""Where the clock begins: what the pipeline compares with the machine's own clock is never over."""
FAULT = 0.05
"""How often each thing that may fail does."""


class World:
    """The database, the clock, and chance."""

    def __init__(self, seed):
        self.now = FAR
        self.database = MemoryDatabase(clock=lambda: self.now)
        self.chance = random.Random(seed)
        self.bad = {f"m{number}": self.chance.randint(1, 3) for number in range(0, 2 * MESSAGES, 50)}
        """How often each of these messages fails when it is alone."""
        self.highest = 0
        """The number of the last message that the receiver has, where messages have numbers."""
        self.told: Counter[str] = Counter()
        """How often each outcome came."""

    def happens(self, share=FAULT):
        return self.chance.random() < share

    def lose_session(self):
        if self.happens():
            raise LostError("the session broke")

    def refuse(self, batch):
        """Fail for a batch with a bad message, and at times for no reason."""
        names = [message.message_id for message in batch]
        bad = [name for name in names if self.bad.get(name)]
        if len(names) == 1 and bad:
            self.bad[bad[0]] -= 1
        if bad or self.happens():
            raise HandlerError("the handler refuses the batch")


class Projection(InTransaction):
    """Effects in the transaction."""

    needs_payload = True

    def __init__(self, world):
        self.world = world

    @override
    def check(self):
        return

    @override
    def handle(self, transaction, batch):
        self.world.refuse(batch)
        for message in batch:
            transaction.connection.write(partial(self.world.database.effects.append, message.message_id))
        self.world.lose_session()
        return len(batch)


class Receiver(OutsideTransaction):
    """Effects that are never taken back."""

    def __init__(self, world):
        self.world = world

    @override
    def check(self):
        return

    @override
    def deliver(self, batch, _epoch):
        self.world.refuse(batch)
        for message in batch:
            if self.world.happens(FAULT / 10):
                raise TransientError("the receiver is gone", reason=Reason.TARGET_UNAVAILABLE)
            self.world.database.effects.append(message.message_id)
        return len(batch)


class Channel(PipelinedTarget):
    """Takes several batches, message by message in their order, some of each before it is asked what became of it."""

    most_under_way = 3
    awaits_confirms = False

    def __init__(self, world):
        self.world = world
        self.begun = []

    @override
    def check(self):
        return

    @override
    def begin(self, batch, _epoch):
        self.begun.append((batch, self.list_sent(batch)))
        self.take(self.world.chance.randrange(2 * LIMIT))

    def list_sent(self, batch):
        """Return each message with its number, if it has one."""
        return [(None, message) for message in batch]

    @override
    def is_under_way(self, batch):
        return any(each is batch for each, _ in self.begun)

    @override
    def deliver(self, batch, epoch):
        if not (self.begun and self.begun[0][0] is batch):
            self.take(None)
            self.begun = []
            self.begin(batch, epoch)
        self.take(len(self.begun[0][1]))
        self.begun.pop(0)
        self.world.refuse(batch)
        return len(batch)

    def take(self, count):
        for _, messages in self.begun:
            while messages and count != 0:
                if self.world.happens(FAULT / 10):
                    self.begun = []
                    raise TransientError("the receiver is gone", reason=Reason.TARGET_UNAVAILABLE)
                number, message = messages.pop(0)
                if number is None or number > self.world.highest:
                    self.world.highest = number or self.world.highest
                    self.world.database.effects.append(message.message_id)
                count = None if count is None else count - 1


class ConfirmingChannel(Channel):
    """Takes the next batch once it has confirmed the one before, so that nothing overtakes what it refuses."""

    most_under_way = 2
    awaits_confirms = True

    @override
    def begin(self, batch, _epoch):
        assert all(each.examined != batch.after for each, _ in self.begun), "the one before is not confirmed"
        self.take(None)
        self.begun = []
        super().begin(batch, _epoch)


class NumberingChannel(Channel):
    """Drops what it has by its number. A message that fails is not sent, and those behind it are."""

    @override
    def list_sent(self, batch):
        numbered = list(zip(list_numbers(batch), batch, strict=True))
        bad = [bool(self.world.bad.get(message.message_id)) for message in batch]
        first = bad.index(True) if any(bad) else len(bad)
        behind = [(None, message) for (_, message), is_bad in zip(numbered, bad, strict=True) if not is_bad][first:]
        return numbered[:first] + behind


class ConfirmingNumberingChannel(NumberingChannel, ConfirmingChannel):
    """The same, as a stream does: batches that follow have numbers."""


class FaultyRunner(MemoryRunner):
    """Loses its session before or after the COMMIT at times."""

    def __init__(self, world):
        self.world = world

    @override
    def commit(self, connection):
        self.world.lose_session()
        super().commit(connection)
        self.world.lose_session()


class FaultyFeed(MemoryFeed):
    """Cannot read at times."""

    world: World

    @override
    def fetch(self, state):
        self.world.lose_session()
        return super().fetch(state)


class Owning:
    """What an owner does before its first batch, and when it was refused."""

    def __init__(self, world, connection, numbering):
        self.world = world
        self.connection = connection
        self.token = uuid4()
        self.numbering = numbering
        self.prepare = lambda _: outcomes.Prepared()
        self.claim = lambda _: outcomes.ClaimAnswered(granted=True, holder=None)
        self.review = lambda _: outcomes.Reviewed(None)
        self.check_target = lambda _: outcomes.TargetReady()
        self.release = None
        self.is_unprepared = lambda _: False

    def acquire(self, _state):
        self.world.lose_session()
        return outcomes.LeaseAnswered(self.world.database.acquire(self.token), "another")

    def load(self, state):
        self.connection.writes = []
        start = MemoryUnit().load(self.connection, lease_of(state))
        if start is None:
            return outcomes.OwnershipLost("the lease went before the start was stored")
        self.connection.commit()
        held, blocked = self.world.database.held, self.world.database.blocked
        pair = replace(start.pair, numbering=start.pair.numbering or self.numbering)
        return outcomes.Loaded(pair, start.start_from_used, outcomes.Review(bool(held), bool(blocked)))

    def record(self, state):
        assert not state.refusal.answer.needs_person, f"no program changed the row: {state.refusal}"
        return outcomes.Recorded(1)


class Process:
    """One worker."""

    def __init__(self, world, guarantee, blocks, receiver=Receiver):
        transactional = guarantee is Guarantee.TRANSACTIONAL
        delivery = {"batchSize": LIMIT, "retry": {"maxAttempts": 1000}, "guarantee": guarantee, "blocks": blocks}
        config = ProcessorConfig.model_validate(
            build_config(None, SQL_TARGET if transactional else {"log": {}}, delivery=delivery)
        )
        self.world = world
        self.policy = Policy(config.delivery)
        self.target = Projection(world) if transactional else receiver(world)
        self.state = initial_state(world.now)
        connection = MemoryConnection(world.database)
        session = SimpleNamespace(connection=lambda: connection)
        context: Any = SimpleNamespace(
            config=config, status=None, target=self.target, isolates=False,
            databases=SimpleNamespace(target=session, source=session),
            ownership=SimpleNamespace(enter=lambda _: None, leave=lambda: None),
            shutdown=SimpleNamespace(limited=lambda _, act: act(), requested=False), throttle=Throttle(config.delivery),
        )  # fmt: skip
        feed = FaultyFeed(world.database, LIMIT)
        feed.world = world
        settling: Any = MemorySettling(connection)
        held: Any = MemoryHeldFeed(connection, LIMIT)
        numbering = Numbering("", 0) if issubclass(receiver, NumberingChannel) else None
        owning: Any = Owning(world, connection, numbering)
        runner: Any = FaultyRunner(world)
        handling = Handling(context, runner, Effects(context), feed, settling, held)
        actions = steps_of_an_owner(context, owning, feed, handling, held)
        self.steps = Steps(owning, StoppedSteps(context), actions)

    def break_connection(self):
        """Let the target lose at times what it has begun to take, as a fault at another partition's batch does."""
        if isinstance(self.target, Channel) and self.target.begun and self.world.happens():
            self.world.told["lost"] += 1
            self.target.begun = []

    def advance(self):
        outcome: Any
        self.world.told["early"] += self.state.begun
        try:
            outcome = self.steps.perform(self.state)
        except OutboxError as err:
            outcome = outcomes.Failed(err)
        self.world.told[type(outcome).__name__] += 1
        self.state = decide_next(self.state, outcome, self.world.now, self.policy, self.world.chance.random())


class Producers:
    """Up to four transactions at a time, some of which roll back, until enough is committed."""

    def __init__(self, world):
        self.world = world
        self.open = []
        self.count = 0

    @property
    def done(self):
        return len(self.world.database.messages) >= MESSAGES and not self.open

    def act(self):
        chance = self.world.chance
        enough = len(self.world.database.messages) >= MESSAGES
        if not enough and len(self.open) < 4 and self.world.happens(0.5):
            self.open.append(MemoryProducer(self.world.database))
        if not self.open:
            return
        producer = chance.choice(self.open)
        if not enough and self.world.happens(0.7):
            self.count += 1
            producer.insert(f"m{self.count}", key=f"k{chance.randrange(KEYS)}")
            return
        self.open.remove(producer)
        producer.roll_back() if self.world.happens(0.1) else producer.commit()


def run(world, *how):
    """Run two processes to the end of the outbox, and a while longer."""
    database, producers = world.database, Producers(world)
    processes = [Process(world, *how), Process(world, *how)]
    left = 300
    for _ in range(20_000):
        if not producers.done:
            producers.act()
        if world.happens(0.01):
            database.alive = False  # the owner is frozen, or its network is gone
        for each in processes:
            each.break_connection()
        if world.happens(0.005):
            processes[world.chance.randrange(2)] = Process(world, *how)  # one was killed
        due = [each for each in processes if each.state.due <= world.now]
        if due:
            world.chance.choice(due).advance()
        else:
            world.now = min(each.state.due for each in processes)
        if producers.done and len(set(database.effects)) == len(database.messages):
            left -= 1
        if not left:
            return
    raise AssertionError(f"it does not end: {[each.state for each in processes]}")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", Blocks)
@pytest.mark.parametrize("guarantee", Guarantee)
def test_no_message_is_lost_doubled_or_overtaken(guarantee, blocks, seed):
    """At least once, one may come again; where a message blocks its key, or nothing, others may pass it."""
    world = World(seed)
    run(world, guarantee, blocks)
    messages = {message.message_id: message for message in world.database.messages}
    found = world.database.effects
    if guarantee is Guarantee.AT_LEAST_ONCE:
        found = list(dict.fromkeys(found))
    assert sorted(found) == sorted(messages), "each once"
    if blocks is Blocks.PARTITION:
        assert found == list(messages), "in the outbox's order"
    if blocks is Blocks.KEY:
        for key in {key_of(message) for message in messages.values()}:
            of_key = [name for name in found if key_of(messages[name]) == key]
            assert of_key == [name for name in messages if key_of(messages[name]) == key], f"{key} in its order"
    unseen = {"Stored", "Failed", "CommitUnknown", "NotCommitted", "Rejected", "LeaseAnswered"} - set(world.told)
    assert not unseen, f"the run has tried too little: {world.told}"
    if blocks is not Blocks.PARTITION:
        assert world.told["HeldHandled"] and world.told["HeldFailed"]  # noqa: PT018


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("some_fail", [False, True], ids=["all_good", "some_fail"])
@pytest.mark.parametrize("receiver", [Channel, ConfirmingChannel, NumberingChannel, ConfirmingNumberingChannel])
def test_batches_under_way_lose_nothing_and_overtake_only_what_fails(receiver, seed, some_fail):
    """The receiver and the database fail at any step; the checkpoint never passes what was not taken.

    By its number each message is taken once, as long as none fails.
    """
    world = World(seed)
    if not some_fail:
        world.bad = {}
    run(world, Guarantee.AT_LEAST_ONCE, Blocks.PARTITION, receiver)
    found = world.database.effects
    if receiver is not ConfirmingNumberingChannel or some_fail:
        found = list(dict.fromkeys(found))
    committed = [message.message_id for message in world.database.messages]
    if some_fail and receiver is not ConfirmingChannel:
        found, committed = sorted(found), sorted(committed)
    assert found == committed
    assert world.told["early"], "batches were begun before their turn"
    assert world.told["lost"]
