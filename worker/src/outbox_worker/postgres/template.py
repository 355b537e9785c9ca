"""Statements that differ in numbers alone: each is composed once, and filled in for each batch.

Numbers stay literals: with parameters the server may keep a plan that it made while a table was empty.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Mapping

_MARK = "\0"
"""No identifier and no literal of PostgreSQL can hold it."""
_NUMBERS: Final = re.compile(r"[0-9a-f:,{}-]*")
"""A hexadecimal number, a snapshot, or an array of numbers: nothing that ends a literal."""


def place(name: str) -> sql.SQL:
    """Mark the place of a number, a snapshot or an array of numbers in a statement, which says its type."""
    return sql.SQL(f"'{_MARK}{name}{_MARK}'")


class Template:
    """A statement with places."""

    def __init__(self, composed: sql.Composable) -> None:
        """Keep the text between the places."""
        parts = composed.as_string(None).split(_MARK)
        self._texts, self._names = parts[::2], parts[1::2]

    def fill(self, numbers: Mapping[str, int | str]) -> sql.Composed:
        """Return the statement with its numbers.

        Raises:
            KeyError: a place has no number.
            ValueError: something else is given for a place.

        """
        texts = iter(self._texts)
        filled = [next(texts)]
        for name, text in zip(self._names, texts, strict=True):
            value = numbers[name]
            is_text = isinstance(value, str) and _NUMBERS.fullmatch(value)
            filled += (str(value if is_text else int(value)), text)
        return sql.Composed([sql.SQL("".join(filled))])
