"""The statements that are more than the call of a function: `NAME.sql` beside a module holds those that it uses.

A statement begins with a line `-- name: fetch_checkpoint` and ends where the next one begins. A name stands once in
the package. Schemas, tables and columns come in as identifiers, values as parameters.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Final

from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.resources.abc import Traversable

_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


@cache
def load(name: str) -> sql.SQL:
    """Return a statement as a template for `sql.SQL.format`.

    Raises:
        KeyError: no file has it.

    """
    return sql.SQL(load_all()[name])


@cache
def in_schema(name: str, schema: str) -> sql.SQL:
    """Return the statement with `{schema}` filled in; the rest are parameters."""
    return sql.SQL(load(name).format(schema=sql.Identifier(schema)).as_string(None))


@cache
def load_all() -> dict[str, str]:
    """Read all statements by their names.

    Raises:
        ValueError: two have the same name.

    """
    found: dict[str, str] = {}
    for file in _files(resources.files("outbox_worker")):
        _, *parts = _NAME.split(file.read_text())
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            if name in found:
                msg = f"two statements are called {name}; the second one is in {file}: give it another name"
                raise ValueError(msg)
            found[name] = text.rstrip("\n")
    return found


def _files(folder: Traversable) -> Iterator[Traversable]:
    for each in folder.iterdir():
        if each.is_dir():
            yield from _files(each)
        elif each.name.endswith(".sql"):
            yield each
