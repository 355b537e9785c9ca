"""A statement that is composed once, of which only numbers differ from batch to batch.

Its numbers stay literals: with parameters the server may keep a plan that it made while the table was empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Mapping

Relation: TypeAlias = sql.Composed
"""A SELECT of messages, to stand in another statement."""

_MARK = "\0"
"""No identifier and no literal of PostgreSQL can hold it."""


def place(name: str) -> sql.SQL:
    """Mark the place of a number in a statement; the statement says its type."""
    return sql.SQL(f"'{_MARK}{name}{_MARK}'")


class Template:
    """A statement with places."""

    def __init__(self, composed: sql.Composable) -> None:
        """Keep the text between the places."""
        parts = composed.as_string(None).split(_MARK)
        self._texts, self._names = parts[::2], parts[1::2]

    def fill(self, numbers: Mapping[str, int]) -> sql.Composed:
        """Return the statement with its numbers.

        Raises:
            KeyError: a place has no number.

        """
        texts = iter(self._texts)
        filled = [next(texts)]
        for name, text in zip(self._names, texts, strict=True):
            filled += (str(int(numbers[name])), text)
        return sql.Composed([sql.SQL("".join(filled))])
