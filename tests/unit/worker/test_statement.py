"""Reading a user's SQL just far enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_worker.postgres.transactions.statement import (
    StatementError,
    find_transaction_end,
    parse_batch_statement,
    split_statements,
    tokenize,
)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("COMMIT", "COMMIT"),
        ("  -- a comment\n commit work", "COMMIT"),
        ("/* nested /* comment */ still */ END", "END"),
        ("SELECT 1; ROLLBACK", "ROLLBACK"),
        ("SELECT ';'; abort", "ABORT"),
        ("rollback and chain", "ROLLBACK"),
        ("prepare transaction 'x'", "PREPARE TRANSACTION"),
        ("ROLLBACK TO SAVEPOINT s", None),
        ("rollback work to s", None),
        ("SAVEPOINT s; RELEASE s", None),
        ("PREPARE p AS SELECT 1", None),
        ("SELECT 'COMMIT; ROLLBACK'", None),
        ("SELECT $été$ ; COMMIT $été$", None),
        ("SELECT 1; commit\U0001f600", None),
        ("SELECT E'it\\'s; COMMIT'", None),
        ('SELECT 1 AS "; commit"', None),
        ("SELECT $$; commit;$$", None),
        ("SELECT $tag$; commit; $$ $tag$, 2", None),
        ("SELECT CASE WHEN true THEN 1 END", None),
        ("-- COMMIT", None),
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END", None),
        ("", None),
    ],
)
def test_what_would_end_a_transaction_is_found(text, command):
    assert find_transaction_end(text) == command


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("INSERT INTO t SELECT * FROM batch;", "WITH batch AS (R) INSERT INTO t SELECT * FROM batch"),
        ("-- why\nSELECT f(x) FROM batch", "WITH batch AS (R) SELECT f(x) FROM batch"),
        ("with a AS (SELECT 1) SELECT 2", "WITH batch AS (R),  a AS (SELECT 1) SELECT 2"),
        ("WITH RECURSIVE a AS (SELECT 1) SELECT 2", "WITH RECURSIVE batch AS (R),  a AS (SELECT 1) SELECT 2"),
        ("(SELECT 1) UNION SELECT 2", "WITH batch AS (R) (SELECT 1) UNION SELECT 2"),
        ("SELECT 1 -- the end", "WITH batch AS (R) SELECT 1"),
    ],
)
def test_the_batch_is_put_before_a_statement_or_into_its_list(text, whole):
    parts = parse_batch_statement(text)
    assert parts.head + "R" + parts.joint + parts.body == whole
    assert text[parts.offset :].startswith(parts.body)


@pytest.mark.parametrize(
    ("text", "message"),
    [("SELECT 1; SELECT 2", "holds 2 statements"), (" ; -- nothing", "holds 0 statements"),
     ("COMMIT", "begins with COMMIT"),
     ("CREATE TABLE t ()", "begins with CREATE")],
)  # fmt: skip
def test_what_is_no_batch_statement_is_refused(text, message):
    with pytest.raises(StatementError, match=message):
        parse_batch_statement(text)


@given(st.text(alphabet="ab';\"$-/*\\\n eE1", max_size=40))
def test_tokens_cover_the_text_in_order_and_reading_ends(text):
    place = 0
    for token in tokenize(text):
        assert token.start >= place
        assert token.end > token.start
        assert text[token.start : token.end] == token.text
        place = token.end
    assert place <= len(text)
    assert all(split_statements(text))
