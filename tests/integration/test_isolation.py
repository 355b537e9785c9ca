"""A batch of which some messages fail, in one transaction: real savepoints."""

from __future__ import annotations

import psycopg
import pytest

from outbox_core.errors import HandlerError, TransientError
from outbox_core.processor.isolation import Found, Search, search_failed
from outbox_worker.postgres.transactions.guard import HandlerEndedTransactionError
from outbox_worker.postgres.transactions.savepoints import MOST_KEPT, isolate, within


@pytest.fixture
def connection(database):
    connection = database.connect()
    connection.execute("CREATE TABLE parents (n int PRIMARY KEY)")
    connection.execute(
        "CREATE TABLE handled (n int PRIMARY KEY CHECK (n % 10 <> 3), "
        "parent int REFERENCES parents DEFERRABLE INITIALLY DEFERRED)"
    )
    return connection


def inserting(connection):
    """Handle message n by a row n; every tenth is refused."""

    def handle(begin, end):
        try:
            for n in range(begin, end):
                connection.execute("INSERT INTO handled VALUES (%s, %s)", (n, -1 if n % 10 == 7 else None))
        except psycopg.Error as err:
            raise HandlerError("refused") from err

    return handle


def is_refusal(error):
    return isinstance(error, HandlerError)


def rows(connection):
    return [row[0] for row in connection.execute("SELECT n FROM handled ORDER BY n").fetchall()]


def test_what_fails_is_undone_and_the_rest_commits_also_where_a_constraint_waits_for_the_commit(connection):
    connection.execute("BEGIN")
    found = isolate(connection, search_failed(40), inserting(connection), is_refusal, within(60))
    connection.execute("COMMIT")
    assert [each.index for each in found.refused] == [n for n in range(40) if n % 10 in (3, 7)]
    assert {str(each.error) for each in found.refused if each.index % 10 == 3} == {"refused"}
    assert all("refused to commit" in str(each.error) for each in found.refused if each.index % 10 == 7)
    assert (found.at, found.handled) == (40, 32)
    assert rows(connection) == [n for n in range(40) if n % 10 not in (3, 7)]


def test_a_constraint_that_waits_for_the_commit_goes_on_waiting_after_a_part(connection):
    """Looking at it early must not make it immediate for the next part."""

    def handle(begin, end):
        for n in range(begin, end):
            connection.execute("INSERT INTO handled VALUES (%s, %s)", (n, n))
            connection.execute("INSERT INTO parents VALUES (%s)", (n,))

    connection.execute("BEGIN")
    assert isolate(connection, Search(3, 1), handle, is_refusal, within(60)).handled == 3
    connection.execute("COMMIT")
    assert rows(connection) == [0, 1, 2]


def test_what_is_no_messages_fault_ends_it(connection):
    def handle(_begin, end):
        if end > 2:
            raise TransientError("the target is away")

    connection.execute("BEGIN")
    with pytest.raises(TransientError, match="away"):
        isolate(connection, Search(4, 1), handle, is_refusal, within(60))
    connection.execute("ROLLBACK")


def test_a_session_that_broke_ends_it_with_what_broke_it(connection):
    def handle(_begin, _end):
        connection.close()
        raise HandlerError("it broke")

    connection.execute("BEGIN")
    with pytest.raises(HandlerError, match="it broke"):
        isolate(connection, Search(4, 4), handle, is_refusal, within(60))


def test_it_stops_when_it_is_enough_but_not_before_something_was_tried(connection):
    connection.execute("BEGIN")
    found = isolate(connection, Search(40, 2), inserting(connection), is_refusal, within(0))
    assert (found.at, found.handled, found.next_block) == (2, 2, 2)
    found = isolate(connection, Search(1000, 1), lambda *_: None, is_refusal, lambda found: found.at >= 6)
    assert found.at == 6
    connection.execute("COMMIT")


def test_however_long_it_takes_to_refuse_a_part_the_search_goes_on_to_the_message(connection):
    """A first part that is refused late must not end it with nothing done: the checkpoint would pass the batch."""
    connection.execute("BEGIN")
    found = isolate(connection, Search(40, 16), inserting(connection), is_refusal, within(0))
    assert (found.at, found.handled) == (2, 2)
    connection.execute("COMMIT")
    assert rows(connection) == [0, 1]


def test_a_transaction_has_as_many_savepoints_as_are_cheap(connection):
    connection.execute("BEGIN")

    def handle(begin, end):
        if end - begin > 1 or begin % 2:
            raise HandlerError("refused")
        connection.execute("INSERT INTO handled VALUES (%s)", (begin * 10,))

    found = isolate(connection, Search(1000, 1), handle, is_refusal, within(60))
    assert found.handled == MOST_KEPT
    connection.execute("COMMIT")


def test_where_the_search_with_one_call_is_refused_itself_each_message_is_tried_all_the_same(connection):
    """The statement cannot be prepared: its table is away. So it ends, and says what each message's error is."""
    connection.execute("INSERT INTO handled VALUES (100)")

    def find(_search, _most):
        try:
            connection.execute("INSERT INTO away VALUES (1)")
        except psycopg.Error as err:
            raise HandlerError("refused as a whole") from err

    connection.execute("BEGIN")
    found = isolate(connection, search_failed(40), inserting(connection), is_refusal, within(60), find)
    connection.execute("COMMIT")
    assert {str(each.error) for each in found.refused if each.index % 10 == 3} == {"refused"}
    assert (found.at, found.handled) == (40, 32)
    assert rows(connection) == [*(n for n in range(40) if n % 10 not in (3, 7)), 100]


def test_what_a_search_with_one_call_found_is_taken_and_the_next_call_goes_on_from_there(connection):
    calls = []

    def find(search, most):
        calls.append((search.at, most))
        return Found(Search(search.count, 8, search.at + 10), 20, ((search.at + 3, HandlerError("refused")),))

    connection.execute("BEGIN")
    found = isolate(connection, Search(1000, 4), inserting(connection), is_refusal, within(60), find)
    connection.execute("COMMIT")
    assert calls == [(0, MOST_KEPT), (10, MOST_KEPT - 20), (20, MOST_KEPT - 40)]
    assert [each.index for each in found.refused] == [3, 13, 23]
    assert (found.at, found.handled, found.next_block) == (30, 27, 8)


def test_a_search_with_one_call_that_finds_what_is_no_messages_fault_ends_it(connection):
    def find(search, _most):
        return Found(Search(search.count, 4, 10), 1, ((3, TransientError("the resource says: for ever")),))

    connection.execute("BEGIN")
    with pytest.raises(TransientError, match="for ever"):
        isolate(connection, Search(40, 4), inserting(connection), is_refusal, within(60), find)
    connection.execute("ROLLBACK")


def test_a_handler_that_ended_the_transaction_of_its_part_and_began_another_is_found_out(connection):
    def handle(_begin, _end):
        connection.execute("COMMIT")
        connection.execute("BEGIN")

    connection.execute("BEGIN")
    with pytest.raises(HandlerEndedTransactionError):
        isolate(connection, Search(4, 2), handle, is_refusal, within(60))
    connection.execute("ROLLBACK")
