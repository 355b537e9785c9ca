"""Calls the schema's functions by name and with named arguments, and loads our other statements.

A call is composed once for each function, schema and set of names. It has no casts: the server finds the types in the
function's own text. Text goes for xid8, pg_snapshot and JSON, a list of text for an array of those. That each call fits
its function is compared in tests/unit/worker/test_calls.py.

`NAME.sql` beside a module holds the other statements that it uses. A statement begins with a line
`-- name: fetch_checkpoint` and ends where the next one begins. A name stands once in the package. Schemas, tables and
columns come in as identifiers, values as parameters.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.rows import dict_row

from outbox_worker.postgres.errors import translate, translated

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from importlib.resources.abc import Traversable
    from typing import LiteralString, TypeAlias

    from outbox_worker.postgres.connection import Connection

    Statement: TypeAlias = LiteralString | sql.SQL | sql.Composed
    Parameters: TypeAlias = Mapping[str, Any] | None
    Row: TypeAlias = tuple[Any, ...]

_NAME: Final = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)
_MARK: Final = "\0"
"""No identifier and no literal of PostgreSQL can hold it."""
_PLAIN: Final = re.compile(r"[\w:,{}/.-]*", re.ASCII)
"""A name, a number, a snapshot, a place in the log, or an array of numbers: nothing that ends a literal."""


def call(connection: Connection, schema: str, function: str, /, **arguments: object) -> Any:
    """Return the function's one value; of a row the first column, None where there is no row.

    Raises:
        OutboxError: as `translate` says.

    """
    row = fetch_row(connection, _compose(schema, function, tuple(arguments)), arguments)
    return None if row is None else row[0]


def call_row(connection: Connection, schema: str, function: str, /, **arguments: object) -> Row:
    """Return the row that the function always answers, its columns in the order of RETURNS; otherwise like `call`."""
    return call_rows(connection, schema, function, **arguments)[0]


def call_rows(connection: Connection, schema: str, function: str, /, **arguments: object) -> list[Row]:
    """Return all rows, of a function that may answer none or several; otherwise like `call_row`."""
    return fetch_rows(connection, _compose(schema, function, tuple(arguments)), arguments)


def fetch_row(connection: Connection, statement: Statement, parameters: Parameters = None) -> Row | None:
    """Return the first row of any statement; otherwise like `call`."""
    try:
        return connection.execute(statement, parameters).fetchone()
    except psycopg.Error as err:
        raise translate(err) from err


def fetch_one(connection: Connection, statement: Statement, parameters: Parameters = None) -> Row:
    """Return the row of a statement that always has one; otherwise like `fetch_row`."""
    return fetch_rows(connection, statement, parameters)[0]


def fetch_rows(connection: Connection, statement: Statement, parameters: Parameters = None) -> list[Row]:
    """Return all rows; otherwise like `fetch_row`."""
    try:
        return connection.execute(statement, parameters).fetchall()
    except psycopg.Error as err:
        raise translate(err) from err


def fetch_dicts(connection: Connection, statement: Statement, parameters: Parameters = None) -> list[dict[str, Any]]:
    """Return all rows, each by the names of its columns; otherwise like `fetch_row`."""
    with translated(), connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, parameters).fetchall()


def compose_call(schema: str, function: str, /, **arguments: object) -> sql.Composed:
    """Return the call with its arguments as literals, for a statement among others that are sent at once."""
    return _compose_with_places(schema, function, tuple(arguments)).fill(arguments)


def let_lists_have_nulls(connection: Connection) -> None:
    """Let a null in a list be one also where array_nulls is off, which makes it the word NULL; in a transaction."""
    fetch_row(connection, "SELECT set_config('array_nulls', 'on', true)")


@cache
def _compose(schema: str, function: str, names: tuple[str, ...]) -> sql.SQL:
    """Write the call as one text, so that nothing is composed at each call."""
    values = [sql.Placeholder(name) for name in names]
    return sql.SQL(sql.SQL("SELECT * FROM {}").format(_name_values(schema, function, names, values)).as_string(None))


@cache
def _compose_with_places(schema: str, function: str, names: tuple[str, ...]) -> Template:
    values = [place(name) for name in names]
    return Template(sql.SQL("SELECT {}").format(_name_values(schema, function, names, values)))


def _name_values(schema: str, function: str, names: tuple[str, ...], values: Sequence[sql.Composable]) -> sql.Composed:
    given = sql.SQL(", ").join(
        sql.SQL("{} => {}").format(sql.Identifier(f"p_{name}"), value)
        for name, value in zip(names, values, strict=True)
    )
    return sql.SQL("{}({})").format(sql.Identifier(schema, function), given)


def place(name: str) -> sql.SQL:
    """Mark the place of a value in a statement."""
    return sql.SQL(f"{_MARK}{name}{_MARK}")


class Template:
    """A statement that differs in values alone: it is composed once, and filled in for each batch.

    Values stay literals: with parameters the server may keep a plan that it made while a table was empty. The server
    finds the type of each where it stands, so numbers are quoted as text is.
    """

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
        quoted = {}
        for name in self._distinct:
            value = values[name]
            if value is None:
                quoted[name] = "NULL"
            elif isinstance(value, int | float | UUID) or (isinstance(value, str) and _PLAIN.fullmatch(value)):
                # Faster than psycopg, which looks for a way to write each type.
                quoted[name] = f"'{value}'"
            else:
                quoted[name] = sql.Literal(value).as_string(None)
        filled = self._parts.copy()
        filled[1::2] = [quoted[name] for name in self._names]
        return sql.Composed([sql.SQL("".join(filled))])


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
