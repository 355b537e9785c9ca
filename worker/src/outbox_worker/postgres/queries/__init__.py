"""One statement a file, loaded once. Schemas, tables and columns come in as identifiers, values as parameters."""

from __future__ import annotations

from functools import cache
from importlib import resources

from psycopg import sql


@cache
def load(name: str) -> sql.SQL:
    """Return the statement of `NAME.sql` as a template for `sql.SQL.format`."""
    text = resources.files(__name__).joinpath(f"{name}.sql").read_text()
    return sql.SQL(text)


@cache
def in_schema(name: str, schema: str) -> sql.Composed:
    """Return the statement with `{schema}` filled in; the rest are parameters."""
    return load(name).format(schema=sql.Identifier(schema))
