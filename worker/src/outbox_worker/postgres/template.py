"""Statements that differ in values alone: each is composed once, and filled in for each batch.

Values stay literals: with parameters the server may keep a plan that it made while a table was empty. The server finds
the type of each where it stands, so numbers are quoted as text is.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final
from uuid import UUID

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK = "\0"
"""No identifier and no literal of PostgreSQL can hold it."""
_PLAIN: Final = re.compile(r"[\w:,{}/.-]*", re.ASCII)
"""A name, a number, a snapshot, a place in the log, or an array of numbers: nothing that ends a literal."""


def place(name: str) -> sql.SQL:
    """Mark the place of a value in a statement."""
    return sql.SQL(f"{_MARK}{name}{_MARK}")


class Template:
    """A statement with places."""

    def __init__(self, composed: sql.Composable) -> None:
        """Keep the text between the places."""
        self._parts = composed.as_string(None).split(_MARK)
        self._names = self._parts[1::2]
        self._distinct = frozenset(self._names)

    def fill(self, values: Mapping[str, object]) -> sql.Composed:
        """Return the statement with its values.

        Raises:
            KeyError: a place has no value.

        """
        quoted = {name: _quote(values[name]) for name in self._distinct}
        filled = self._parts.copy()
        filled[1::2] = [quoted[name] for name in self._names]
        return sql.Composed([sql.SQL("".join(filled))])


def _quote(value: object) -> str:
    """Write a literal; what needs no escaping faster than psycopg, which looks for a way to write each type."""
    if value is None:
        return "NULL"
    if isinstance(value, int | float | UUID) or (isinstance(value, str) and _PLAIN.fullmatch(value)):
        return f"'{value}'"
    return sql.Literal(value).as_string(None)
