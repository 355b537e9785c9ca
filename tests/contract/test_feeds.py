"""What every database's feeds promise: the in-memory ones, and PostgreSQL's.

An author of feeds over another database fills a bench (`tests/support/feeds/bench.py`) and adds it to `BENCHES`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from outbox_core.errors import TransientError
from outbox_core.message import Held
from outbox_core.part import Place
from outbox_core.processor import outcomes
from outbox_core.processor.failing import Action, Failure, FailureDecision
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from tests.support.feeds.bench import LIMIT
from tests.support.feeds.memory_feeds import MemoryBench
from tests.support.feeds.postgres import PostgresBench
from tests.support.servers.postgres import POOLED, VERSIONS, mostly_nightly

MEMORY = "memory"
BENCHES = [MEMORY, *mostly_nightly(*VERSIONS, POOLED)]


@pytest.fixture(params=BENCHES)
def bench(request, servers):
    if request.param == MEMORY:
        yield MemoryBench()
        return
    with servers.shared(request.param) as database:
        found = PostgresBench(database)
        yield found
        found.close()


def produce(bench, *names, key=None):
    """Store messages in one transaction."""
    producer = bench.begin()
    producer.insert(*names, key=key)
    producer.commit()


def fetch(owner, limit=None, *, blocking=False):
    """Read the next batch after what the owner knows."""
    fetched = owner.feed.fetch(owner.state._replace(limit=limit, blocking=blocking))
    assert isinstance(fetched, outcomes.Fetched)
    return fetched.batch


def names(batch):
    return [message.message_id for message in batch]


def take(bench, owner, limit=None, *, blocking=False, failed=()):
    """Read the next batch and handle it; return it."""
    batch = fetch(owner, limit, blocking=blocking)
    assert bench.handle(owner, batch, failed) == outcomes.Stored(batch.examined, len(batch.messages) - len(failed))
    owner.go_on(batch.examined)
    return batch


def drain(bench, owner, limit=None):
    """Handle batch after batch until nothing is left; return them."""
    batches = []
    while fetch(owner, limit).matched_count:
        batches.append(take(bench, owner, limit))
    return batches


def fail(place, attempts=1, action=Action.HOLD, *, wait=0.0):
    """Say what becomes of a message that failed."""
    return Failure(
        place, FailureDecision(action, attempts, "E", "no", wait if action is Action.HOLD else None, blocks=True)
    )


def take_held(bench, owner):
    """Take the held messages that are due and handle them; return them."""
    taken = owner.held.fetch(owner.state)
    assert taken.batch is not None
    assert isinstance(bench.handle(owner, taken.batch), outcomes.Stored)
    return taken.batch


def drain_held(bench, owner):
    """Handle held messages until none is due; return their ids."""
    found = []
    while owner.held.fetch(owner.state).batch is not None:
        found += names(take_held(bench, owner))
    return found


class TestFetch:
    def test_an_empty_outbox_gives_a_batch_of_nothing(self, bench):
        batch = fetch(bench.own())
        assert not batch.matched_count
        assert not batch.full
        assert (batch.after, batch.examined, names(batch)) == (BEGINNING, BEGINNING, [])

    def test_nothing_comes_after_the_end(self, bench):
        produce(bench, *"abc")
        owner = bench.own()
        last = take(bench, owner)
        batch = fetch(owner)
        assert not batch.matched_count
        assert (batch.after, batch.examined, batch.full) == (last.examined, last.examined, False)

    @pytest.mark.parametrize("limit", [1, 3, LIMIT])
    def test_batches_are_in_order_and_complete(self, bench, limit):
        expected = []
        for number in range(7):
            produce(bench, *(made := [f"m{number}-{n}" for n in range(number)]))
            expected += made
        owner = bench.own()
        batches = drain(bench, owner, limit)
        found = [message for batch in batches for message in batch]
        assert [message.message_id for message in found] == expected
        assert [message.checkpoint for message in found] == sorted({message.checkpoint for message in found})
        assert all(1 <= len(batch) <= limit for batch in batches)
        assert all(before.examined == batch.after for before, batch in pairwise(batches))
        assert all(batch.examined >= batch.messages[-1].checkpoint for batch in batches)

    def test_full_says_that_more_is_waiting(self, bench):
        produce(bench, *(f"m{n}" for n in range(2 * LIMIT + 1)))
        owner = bench.own()
        assert [batch.full for batch in drain(bench, owner)] == [True, True, False]

    def test_no_batch_has_more_than_the_resource_allows(self, bench):
        produce(bench, *(f"m{n}" for n in range(LIMIT + 1)))
        assert len(fetch(bench.own(), 10 * LIMIT)) == LIMIT

    def test_a_fetch_changes_nothing(self, bench):
        produce(bench, *"abc")
        owner = bench.own()
        assert names(fetch(owner)) == names(fetch(owner)) == ["a", "b", "c"]
        assert bench.stored() == BEGINNING

    def test_a_transaction_in_progress_holds_back_itself_and_all_after_it(self, bench):
        owner, slow = bench.own(), bench.begin()
        produce(bench, "before")
        slow.insert("slow")
        produce(bench, "after")
        take(bench, owner)
        assert bench.effects() == ["before"]
        assert not fetch(owner).matched_count
        slow.commit()
        assert names(fetch(owner)) == ["slow", "after"]

    def test_what_was_rolled_back_is_neither_given_nor_waited_for(self, bench):
        owner, failing = bench.own(), bench.begin()
        failing.insert("never")
        produce(bench, "after")
        assert not fetch(owner).matched_count
        failing.roll_back()
        assert names(fetch(owner)) == ["after"]

    def test_pairs_are_compared_whole(self, bench):
        """Positions do not rise along the order: the first transaction's last one is above the second's."""
        owner, first, second = bench.own(), bench.begin(), bench.begin()
        first.insert("a")
        second.insert("b")
        first.insert("c")
        second.commit()
        assert not fetch(owner).matched_count
        first.commit()
        found = fetch(owner)
        assert names(found) == ["a", "c", "b"]
        assert found.messages[1].checkpoint.position > found.messages[2].checkpoint.position
        assert [names(batch) for batch in drain(bench, owner, 1)] == [["a"], ["c"], ["b"]]


class TestSettle:
    def test_the_first_owner_stores_where_it_starts(self, bench):
        owner = bench.own()
        assert (owner.state.stored, bench.stored()) == (BEGINNING, BEGINNING)

    def test_without_the_lease_no_start_is_stored(self, bench):
        former = bench.own(loads=False)
        bench.end_lease()
        assert bench.load(former) is None
        assert bench.stored() is None

    def test_what_is_stored_is_where_the_next_owner_begins(self, bench):
        produce(bench, *"abcde")
        batch = take(bench, bench.own(), 2)
        assert bench.stored() == batch.examined
        heir = bench.own()
        assert heir.state.stored == batch.examined
        assert names(take(bench, heir)) == ["c", "d", "e"]
        assert bench.effects() == list("abcde")

    def test_the_request_names_lease_and_both_checkpoints(self, bench):
        produce(bench, "a")
        owner = bench.own()
        batch = fetch(owner)
        request = owner.settling.request(owner.state, batch)
        assert (request.lease, request.expected, request.new) == (owner.state.lease, BEGINNING, batch.examined)

    @pytest.mark.parametrize("successor", [True, False], ids=["another process has the lease", "no process asked yet"])
    def test_without_the_lease_nothing_is_committed(self, bench, successor):
        produce(bench, *"abc")
        former = bench.own()
        batch = fetch(former)
        bench.end_lease()
        heir = bench.own() if successor else None
        refused = bench.handle(former, batch)
        assert refused == outcomes.Rejected(StoreAnswer.NOT_OWNER, BEGINNING, batch.examined, BEGINNING)
        assert (bench.effects(), bench.stored()) == ([], BEGINNING)
        take(bench, heir or bench.own())
        assert bench.effects() == ["a", "b", "c"]

    @pytest.mark.parametrize(
        ("place", "transactions", "answer"),
        [
            pytest.param(5, 0, StoreAnswer.IGNORED, id="it is the new one"),
            pytest.param(6, 0, StoreAnswer.AHEAD, id="it is after the new one"),
            pytest.param(4, 0, StoreAnswer.AHEAD, id="it is between both"),
            pytest.param(1, 0, StoreAnswer.OLDER, id="it is before the expected one"),
            pytest.param(3, 1, StoreAnswer.AHEAD, id="it has the expected position in a later transaction"),
            pytest.param(3, -1, StoreAnswer.OLDER, id="it has the expected position in an earlier transaction"),
            pytest.param(None, 0, StoreAnswer.OLDER, id="it is gone"),
        ],
    )
    def test_another_checkpoint_than_the_expected_one_rolls_back(self, bench, place, transactions, answer):
        """Messages 1 to 3 are handled and 4 and 5 in hand when the stored checkpoint changes.

        It becomes that of message `place`, or of so many transactions later.
        """
        produce(bench, *(f"m{n}" for n in range(1, 7)))
        owner = bench.own()
        pairs = [message.checkpoint for message in fetch(owner)]
        take(bench, owner, 3)
        batch, found = fetch(owner, 2), None
        if place is not None:
            pair = pairs[place - 1]
            found = Checkpoint(pair.transaction_id + transactions, pair.position)
        bench.overwrite(found)
        assert bench.handle(owner, batch) == outcomes.Rejected(answer, pairs[2], pairs[4], found)
        assert (bench.effects(), bench.stored()) == (["m1", "m2", "m3"], found)

    def test_a_batch_is_stored_once(self, bench):
        produce(bench, *"ab")
        owner = bench.own()
        batch = fetch(owner)
        assert bench.handle(owner, batch) == outcomes.Stored(batch.examined, 2)
        again = bench.handle(owner, batch)
        assert again == outcomes.Rejected(StoreAnswer.IGNORED, BEGINNING, batch.examined, batch.examined)
        assert bench.effects() == ["a", "b"]

    def test_places_have_the_keys_in_order(self, bench):
        """A message without a key is its own."""
        produce(bench, "a", "b", key="k1")
        produce(bench, "c")
        produce(bench, "d", key="k2")
        owner = bench.own()
        batch = fetch(owner)
        pairs = [message.checkpoint for message in batch]
        keys = ["k1", "k1", "c", "k2"]
        assert [*owner.settling.places(batch)] == [*map(Place, pairs, keys)]


class TestFindLoss:
    def test_the_owner_may_hand_over(self, bench):
        produce(bench, "a")
        owner = bench.own()
        assert owner.settling.find_loss(owner.state, fetch(owner)) is None

    @pytest.mark.parametrize("successor", [True, False], ids=["another process has the lease", "no process asked yet"])
    def test_a_former_owner_may_not(self, bench, successor):
        produce(bench, "a")
        former = bench.own()
        batch = fetch(former)
        bench.end_lease()
        if successor:
            bench.own()
        told = former.settling.find_loss(former.state, batch)
        assert told == outcomes.Rejected(StoreAnswer.NOT_OWNER, BEGINNING, batch.examined, BEGINNING)


class TestConfirm:
    """The session broke in the transaction that was to store a batch of two messages."""

    @pytest.fixture
    def owner(self, bench):
        return bench.own()

    @pytest.fixture
    def batch(self, bench, owner):
        produce(bench, "a", "b")
        return fetch(owner)

    @pytest.fixture
    def confirm(self, owner, batch):
        def ask(*, committing=True):
            doubt = outcomes.CommitUnknown(BEGINNING, batch.examined, committing, TransientError("the session broke"))
            return owner.settling.confirm(owner.state._replace(batch=batch, doubt=doubt))

        return ask

    def test_it_was_committed(self, bench, owner, batch, confirm):
        bench.handle(owner, batch)
        assert confirm() == outcomes.Stored(batch.examined, 2)
        assert bench.effects() == ["a", "b"]

    @pytest.mark.parametrize("committing", [True, False], ids=["during COMMIT", "before COMMIT"])
    def test_it_was_not_committed(self, bench, confirm, committing):
        assert confirm(committing=committing) == outcomes.NotCommitted()
        assert bench.stored() == BEGINNING

    @pytest.mark.parametrize("committed", [True, False], ids=["committed", "not committed"])
    def test_the_lease_went_meanwhile(self, bench, owner, batch, confirm, committed):
        if committed:
            bench.handle(owner, batch)
        heir = bench.own()
        told = confirm()
        assert isinstance(told, outcomes.Rejected)
        assert told.answer is StoreAnswer.NOT_OWNER
        drain(bench, heir)
        assert bench.effects() == ["a", "b"]

    def test_another_program_changed_the_checkpoint(self, bench, batch, confirm):
        bench.overwrite(Checkpoint(batch.examined.transaction_id + 1, 1))
        told = confirm()
        assert isinstance(told, outcomes.Rejected)
        assert (told.answer, told.stored) == (StoreAnswer.AHEAD, bench.stored())


class TestHold:
    """Message b of key k1 fails, and c of k1 waits behind it; a of k2 is handled."""

    @pytest.fixture
    def owner(self, bench):
        return bench.own()

    @pytest.fixture
    def batch(self, bench, owner):
        produce(bench, "a", key="k2")
        produce(bench, "b", "c", key="k1")
        found = fetch(owner)
        return replace(
            found, messages=found.messages[:2], matched_count=2, excluded=(found.messages[2].checkpoint,)
        )  # fmt: skip

    @pytest.fixture
    def hold(self, bench, owner, batch):
        """Handle the batch; b is held, and due after so many seconds."""

        def hold_it(wait=0.0):
            failed = (fail(batch.messages[1].checkpoint, wait=wait),)
            assert bench.handle(owner, batch, failed) == outcomes.Stored(batch.examined, 1)
            owner.go_on(batch.examined)

        return hold_it

    def test_what_fails_is_passed_and_held_and_its_key_waits(self, bench, owner, batch, hold):
        hold()
        assert (bench.effects(), bench.stored()) == (["a"], batch.examined)
        produce(bench, "d", key="k1")
        produce(bench, "e", key="k2")
        later = fetch(owner, blocking=True)
        assert names(later) == ["e"]
        assert [place.key for place in owner.settling.places(later)] == ["k2"]
        (waits,) = later.excluded
        assert batch.examined < waits < later.messages[0].checkpoint
        assert later.matched_count == 1

    def test_the_key_waits_under_the_next_owner_too(self, bench, hold):
        hold()
        produce(bench, "d", key="k1")
        assert fetch(bench.own(), blocking=True).messages == ()

    def test_without_the_lease_nothing_is_held(self, bench, owner, batch):
        heir = bench.own()
        refused = bench.handle(owner, batch, (fail(batch.messages[1].checkpoint),))
        assert isinstance(refused, outcomes.Rejected)
        assert refused.answer is StoreAnswer.NOT_OWNER
        assert (bench.effects(), bench.stored()) == ([], BEGINNING)
        assert names(fetch(heir, blocking=True)) == ["a", "b", "c"]

    def test_nothing_is_due_where_nothing_is_held(self, owner):
        assert owner.held.fetch(owner.state) == outcomes.HeldTaken(None, None, blocking=False)

    def test_it_is_not_tried_before_it_is_due(self, owner, hold):
        hold(wait=3600.0)
        taken = owner.held.fetch(owner.state)
        assert taken.batch is None
        assert taken.blocking
        assert 3500 < taken.next_in <= 3600

    def test_it_is_tried_again_and_what_waits_behind_it_follows(self, bench, owner, hold):
        hold()
        assert drain_held(bench, owner) == ["b", "c"]
        assert bench.effects() == ["a", "b", "c"]
        assert owner.held.fetch(owner.state) == outcomes.HeldTaken(None, None, blocking=False)
        produce(bench, "d", key="k1")
        assert names(fetch(owner, blocking=True)) == ["d"]

    def test_held_messages_have_their_keys_and_attempts(self, owner, batch, hold):
        hold()
        taken = owner.held.fetch(owner.state).batch
        place = batch.messages[1].checkpoint
        assert taken.held == (Held(place, "k1", "b", 1),)
        assert (names(taken), taken.matched_count) == (["b"], 1)
        assert [*owner.held.places(taken)] == [Place(place, "k1")]
        assert owner.held.request(owner.state, taken) is None

    def test_what_fails_again_counts_its_attempts_and_keeps_its_place(self, bench, owner, batch, hold):
        hold()
        place = batch.messages[1].checkpoint
        assert owner.held.fail(owner.state, (fail(place, 2),)) == outcomes.HeldFailed()
        (held,) = owner.held.fetch(owner.state).batch.held
        assert (held.message_id, held.attempts) == ("b", 2)
        assert drain_held(bench, owner) == ["b", "c"]

    def test_some_of_those_taken_are_handled_and_the_others_stay(self, bench, owner, hold):
        """Once b is handled c is due, and with it d of k1, which came later."""
        hold()
        produce(bench, "d", key="k1")
        later = fetch(owner, blocking=True)
        assert bench.handle(owner, later) == outcomes.Stored(later.examined, 0)
        assert names(take_held(bench, owner)) == ["b"]
        taken = owner.held.fetch(owner.state).batch
        assert names(taken) == ["c", "d"]
        only = replace(taken, held=taken.held[:1], messages=taken.messages[:1], matched_count=1)
        assert isinstance(bench.handle(owner, only), outcomes.Stored)
        assert bench.effects() == ["a", "b", "c"]
        assert drain_held(bench, owner) == ["d"]

    def test_a_dead_letter_is_not_tried_again_and_its_key_waits(self, bench, owner, batch, hold):
        hold()
        assert owner.held.fail(owner.state, (fail(batch.messages[1].checkpoint, 2, Action.DEAD_LETTER),)) is not None
        taken = owner.held.fetch(owner.state)
        assert (taken.batch, taken.next_in, taken.blocking) == (None, None, True)
        produce(bench, "d", key="k1")
        assert fetch(owner, blocking=True).messages == ()

    def test_a_skipped_message_frees_its_key(self, bench, owner, batch, hold):
        hold()
        owner.held.fail(owner.state, (fail(batch.messages[1].checkpoint, 2, Action.SKIP),))
        assert drain_held(bench, owner) == ["c"]

    def test_without_the_lease_nothing_held_is_taken_or_changed(self, bench, owner, batch, hold):
        hold()
        taken = owner.held.fetch(owner.state).batch
        heir = bench.own()
        assert isinstance(owner.held.fetch(owner.state), outcomes.OwnershipLost)
        assert isinstance(bench.handle(owner, taken), outcomes.OwnershipLost)
        failed = (fail(batch.messages[1].checkpoint, 2, Action.SKIP),)
        assert isinstance(owner.held.fail(owner.state, failed), outcomes.OwnershipLost)
        assert bench.effects() == ["a"]
        assert drain_held(bench, heir) == ["b", "c"]

    def test_what_is_held_no_more_is_not_handled_twice(self, bench, owner, hold):
        hold()
        taken = owner.held.fetch(owner.state).batch
        assert isinstance(bench.handle(owner, taken), outcomes.Stored)
        assert bench.handle(owner, taken) == outcomes.HeldChanged()
        assert bench.effects() == ["a", "b"]
