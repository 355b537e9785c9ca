"""A statement that is composed once gets its numbers, and nothing else of it changes."""

from __future__ import annotations

import pytest
from psycopg import sql

from outbox_worker.postgres.template import Template, place

LOWEST = -(2**63)


def test_places_get_numbers_and_the_rest_stays_as_it_is():
    rows = sql.SQL("SELECT {} FROM t WHERE p > {}::bigint AND q > {}::bigint").format(
        sql.Literal("50 % of {after} 'quoted'"), place("after"), place("after")
    )
    template = Template(rows)
    for number in (7, LOWEST):
        filled = template.fill({"after": number}).as_string(None)
        expected = (
            f"SELECT '50 % of {{after}} ''quoted''' FROM t WHERE p > '{number}'::bigint AND q > '{number}'::bigint"
        )
        assert filled == expected


@pytest.mark.parametrize("text", ["10:12:10,11", "0:0:", "{1,-2,3}", "{}", "0af9", ""])
def test_a_place_gets_a_snapshot_an_array_or_a_hexadecimal_number(text):
    assert Template(place("seen")).fill({"seen": text}).as_string(None) == f"'{text}'"


def test_a_place_without_a_number_is_refused():
    with pytest.raises(KeyError, match="after"):
        Template(place("after")).fill({})


@pytest.mark.parametrize("text", ["1; DROP TABLE t", "1'", "10:12:\n", "\\"])
def test_nothing_else_is_put_in(text):
    with pytest.raises(ValueError, match="invalid literal"):
        Template(place("after")).fill({"after": text})
