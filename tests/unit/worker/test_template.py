"""A statement that is composed once gets its values, and nothing else of it changes."""

from __future__ import annotations

from datetime import timedelta
from uuid import UUID

import pytest
from psycopg import sql

from outbox_worker.postgres.call import Template, place

LOWEST = -(2**63)


def test_places_get_values_and_the_rest_stays_as_it_is():
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


@pytest.mark.parametrize(
    "text",
    ["10:12:10,11", "0:0:", "{1,-2,3}", "{}", "0af9", "", "0/16B3748", "orders-2", "1; DROP TABLE t", "1'", "a b\n"],
)
def test_text_is_quoted(text: str):
    escaped = text.replace("'", "''")
    assert Template(place("seen")).fill({"seen": text}).as_string(None) == f"'{escaped}'"


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        pytest.param(None, "NULL", id="none"),
        pytest.param(0.5, "'0.5'", id="float"),
        pytest.param(UUID(int=10), "'00000000-0000-0000-0000-00000000000a'", id="uuid"),
        pytest.param("\\", " E'\\\\'", id="backslash"),
        pytest.param(timedelta(seconds=2), "'0:00:02'::interval", id="interval"),
    ],
)
def test_other_values_are_literals_too(value: object, literal: str):
    assert Template(place("seen")).fill({"seen": value}).as_string(None) == literal


def test_a_place_without_a_value_is_refused():
    with pytest.raises(KeyError, match="after"):
        Template(place("after")).fill({})
