"""From its plan to its end `outbox repair` is alone: who asks meanwhile is handed nothing."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from typing_extensions import override

from outbox_core.processor.outcomes import NothingTaken
from outbox_core.processor.turns import Turn
from outbox_worker.postgres.admin.repair import Outbox, Repairer
from outbox_worker.postgres.ownership import leases as ownership
from tests.integration.cli.conftest import Cli
from tests.support.database.concurrency import wait_until_blocked
from tests.support.database.consuming import HOUR, KEY, OVER, claim, cut, join, produce, taker
from tests.support.servers.restore import next_id, use_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import psycopg

    from outbox_worker.postgres.admin.repair import Plan, Repair
    from tests.support.servers.postgres import Database

TOKEN = uuid4()


def acquires(connection: psycopg.Connection[Any]) -> bool:
    """Whether a process that found nothing wrong a moment ago becomes the owner."""
    return ownership.acquire_lease(connection, KEY, claim_uid="u1", pod="late", token=TOKEN, lease=HOUR).acquired


def takes_what_is_left(connection: psycopg.Connection[Any]) -> bool:
    return taker("late").take_left(connection, Turn.FRESH) is not None


def is_handed_the_next(connection: psycopg.Connection[Any]) -> bool:
    return not isinstance(taker("late").claim_next(connection), NothingTaken)


ACTS = [acquires, takes_what_is_left, is_handed_the_next]


@dataclass
class Interrupted:
    """What is asked for between the plan of a repair and its end."""

    database: Database
    act: Callable[[psycopg.Connection[Any]], bool]
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    asked: list[Future[bool]] = field(default_factory=list)

    def ask(self) -> None:
        self.asked.append(self.pool.submit(self.act, self.database.connect()))
        wait_until_blocked(self.database, self.asked[0])


class InterruptedRepairer(Repairer):
    interrupted: Interrupted

    @override
    def _plan(self, reason: str, decided_by: str) -> tuple[Plan, Repair | None]:
        planned = super()._plan(reason, decided_by)
        self.interrupted.ask()
        return planned


@pytest.fixture
def restored(database: Database) -> Database:
    """An outbox with a processor, a batch of mode Competing whose consumer is gone, and rows of another server."""
    connection = database.connect()
    claim(connection)
    join(connection)
    produce(connection, 20)
    cut(connection, taker("gone", lease=OVER))
    connection.execute(
        "INSERT INTO outbox.messages (transaction_id, message_type, data) VALUES ('987654321', 'came', '{}')"
    )
    return database


@pytest.mark.parametrize("act", ACTS)
def test_who_asks_while_it_is_planned_waits_and_is_refused(restored: Database, act: Any) -> None:
    """A plan of a large outbox takes minutes, and sees what was there when it began."""
    repairer = InterruptedRepairer(restored.connect(), "outbox", [Outbox("outbox", "messages")])
    repairer.interrupted = interrupted = Interrupted(restored, act)

    repairer.begin("restored", "test")

    assert interrupted.asked[0].result() is False
    interrupted.pool.shutdown()


@pytest.mark.parametrize("act", ACTS)
def test_who_asks_before_it_is_finished_is_refused(restored: Database, act: Any) -> None:
    """A worker looks at the database before it acquires its lease; in between it may import a handler for minutes."""
    repairer = Repairer(restored.connect(), "outbox", [Outbox("outbox", "messages")])
    begun = repairer.begin("restored", "test")
    assert act(restored.connect()) is False
    repairer.rewrite(begun, 1000, lambda _done, _total: None)
    assert act(restored.connect()) is False

    repairer.finish(begun)

    assert act(restored.connect()) is True


def test_a_session_that_keeps_a_lease_locked_is_to_be_ended(restored: Database) -> None:
    restored.direct().execute("INSERT INTO outbox.processor_leases (processor_id) VALUES ('orders')")
    frozen = restored.direct(autocommit=False)
    frozen.execute("SELECT FROM outbox.processor_leases FOR KEY SHARE")
    cli = Cli(restored.files().directory)

    refused = cli.run("repair", "--yes", "--reason", "restored")

    assert refused.returncode == 1
    assert "another session has kept a lease or a batch locked for 10 s" in refused.stderr
    frozen.rollback()
    assert cli.run("repair", "--yes", "--reason", "restored").returncode == 0


def test_a_frozen_consumer_that_wakes_completes_no_batch(restored: Database) -> None:
    """It would read the range by its old ids, find nothing there, and take ten messages for done."""
    frozen = taker("frozen", lease=OVER)
    claimed = cut(restored.connect(), frozen)
    repairer = Repairer(restored.connect(), "outbox", [Outbox("outbox", "messages")])
    begun = repairer.begin("restored", "test")
    repairer.rewrite(begun, 1000, lambda _done, _total: None)

    assert frozen.renew(restored.connect(), claimed) == 0
    assert not frozen.complete(restored.connect(), claimed, claimed.upto, claimed.count)

    repairer.finish(begun)
    assert not frozen.complete(restored.connect(), claimed, claimed.upto, claimed.count)


class RedrivingRepairer(Repairer):
    """Has dead letters redriven while it maps one table after the other."""

    interrupted: Interrupted

    @override
    def _map(self, table: str, columns: Sequence[Any], parameters: dict[str, Any]) -> None:
        if table == "competing_retries":
            self.interrupted.ask()
        super()._map(table, columns, parameters)


def redrives(connection: psycopg.Connection[Any]) -> bool:
    connection.execute("SELECT outbox.redrive_competing('orders', array_agg(id)) FROM outbox.dead_letters")
    return True


def test_what_is_redriven_while_it_finishes_has_the_new_ids(restored: Database) -> None:
    """A copy with another id than its retry is not found, and the message of a later filter with it."""
    connection = restored.connect()
    connection.execute(
        "INSERT INTO outbox.dead_letters (processor_id, key, transaction_id, position, message_id, message_type, data, "
        "attempts, error_class, error) SELECT 'orders', 'k', transaction_id, position, message_id, 'came', '{}', 1, "
        "'E', 'e' FROM outbox.messages WHERE message_type = 'came'"
    )
    repairer = RedrivingRepairer(restored.connect(), "outbox", [Outbox("outbox", "messages")])
    repairer.interrupted = interrupted = Interrupted(restored, redrives)
    begun = repairer.begin("restored", "test")
    repairer.rewrite(begun, 1000, lambda _done, _total: None)

    repairer.finish(begun)

    assert interrupted.asked[0].result()
    interrupted.pool.shutdown()
    for table in ("competing_copies", "competing_retries"):
        found = connection.execute(
            f"SELECT count(*), count(o.position) FROM outbox.{table} AS r LEFT JOIN outbox.messages AS o "
            "ON (o.transaction_id, o.position) = (r.transaction_id, r.position)"
        )
        assert found.fetchone() == (1, 1), table


def test_nothing_is_pruned_by_a_checkpoint_that_the_counter_has_passed(database: Database) -> None:
    """What was stored here since the restore lies below it, and no processor has handled it."""
    connection = database.direct()
    ahead = next_id(connection) + 50
    connection.execute(
        "SELECT outbox.rewind_processor_checkpoint('orders', 0, %s::text::xid8, 9, 'came', 'x')", (ahead,)
    )
    produce(connection, 3)
    use_up(connection, ahead + 5)

    done = Cli(database.files().directory).run("prune", "--no-remote-readers", "--yes", "--reason", "full")

    assert done.returncode == 3
    assert f"orders: the checkpoint names transaction id {ahead}, above" in done.stderr
    assert "run `outbox repair` first" in done.stderr
    assert connection.execute("SELECT count(*) FROM outbox.messages").fetchone() == (3,)
