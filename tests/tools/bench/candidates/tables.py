"""Targets in the outbox's own database: effects and checkpoint commit together."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.tools.bench import rows
from tests.tools.bench.candidates.targets import Target
from tests.tools.ledger.account import Handled

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg

    from tests.tools.bench.servers import Place


class Table(Target):
    """A table that only this processor writes."""

    columns: str
    counted: str
    """An expression over the whole table: how many messages it has."""

    def __init__(self) -> None:
        self.table = ""
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def connection(self) -> psycopg.Connection[Any]:
        assert self._connection is not None
        return self._connection

    @override
    def open(self, place: Place, name: str) -> None:
        self.table = f"handled_{name.replace('-', '_')}"
        self._connection = place.database.direct()
        self.connection.execute(f"CREATE TABLE {self.table} ({self.columns})")

    @override
    def count(self) -> int:
        row = self.connection.execute(f"SELECT {self.counted} FROM {self.table}").fetchone()
        return int(row[0] or 0) if row else 0

    @override
    def take(self) -> Iterable[Handled]:
        found = self.read()
        self.connection.execute(f"TRUNCATE {self.table}")
        return found

    @abstractmethod
    def read(self) -> list[Handled]:
        """Return every message that the table has, in the order in which it came."""


class SqlRows(Table):
    """Target `sql`: a row for each message."""

    columns = "handled_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id text, key text, sequence bigint"
    counted = "max(handled_id) - coalesce(min(handled_id), 0) + 1"

    @override
    def spec(self) -> dict[str, Any]:
        statement = (
            f"INSERT INTO {self.table} (message_id, key, sequence) "
            "SELECT message_id, partition_key, (data->>'sequence')::bigint FROM batch ORDER BY ordinal"
        )
        return {"sql": {"statement": statement}}

    @override
    def read(self) -> list[Handled]:
        query = f"SELECT message_id, key, sequence FROM {self.table} ORDER BY handled_id"
        return [Handled(*row) for row in self.connection.execute(query)]


class Numbers(Table):
    """A table with the numbers of each batch."""

    columns = "batch bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, ns bigint[], counted bigint"
    counted = "sum(counted)"

    @override
    def read(self) -> list[Handled]:
        query = f"SELECT ns FROM {self.table} ORDER BY batch"
        return [rows.handled(n) for (numbers,) in self.connection.execute(query) for n in numbers]


class SqlSums(Numbers):
    """Target `sql`: an aggregate for each key; the numbers of each batch stand beside it, for the ledger."""

    @override
    def open(self, place: Place, name: str) -> None:
        super().open(place, name)
        self.connection.execute(f"CREATE TABLE {self.table}_sums (key text PRIMARY KEY, messages bigint, cents bigint)")

    @override
    def spec(self) -> dict[str, Any]:
        statement = (
            f"WITH numbers AS (INSERT INTO {self.table} (ns, counted) "
            "SELECT array_agg((data->>'n')::bigint ORDER BY ordinal), count(*) FROM batch) "
            f"INSERT INTO {self.table}_sums AS sums (key, messages, cents) "
            "SELECT partition_key, count(*), sum((data->>'cents')::bigint) FROM batch GROUP BY 1 "
            "ON CONFLICT (key) DO UPDATE "
            "SET messages = sums.messages + excluded.messages, cents = sums.cents + excluded.cents"
        )
        return {"sql": {"statement": statement}}


class PythonNumbers(Numbers):
    """Target `python`: a function that stores the numbers of its batch, and nothing else.

    With `each` it loops over the messages, so that the product calls for each of them.
    """

    _BATCH = """
def handle(batch, connection):
    numbers = [int(message.message_id[2:]) for message in batch]
    connection.execute("INSERT INTO {table} (ns, counted) VALUES (%s, %s)", (numbers, len(numbers)))
"""
    _EACH = """
def handle_one(message, numbers):
    numbers.append(int(message.message_id[2:]))


def handle(batch, connection):
    numbers = []
    for message in batch:
        handle_one(message, numbers)
    connection.execute("INSERT INTO {table} (ns, counted) VALUES (%s, %s)", (numbers, len(numbers)))
"""

    def __init__(self, *, each: bool = False) -> None:
        super().__init__()
        self._code = self._EACH if each else self._BATCH

    @override
    def open(self, place: Place, name: str) -> None:
        super().open(place, name)
        self.handler = self._code.format(table=self.table)

    @override
    def spec(self) -> dict[str, Any]:
        return {"python": {"module": "orders", "function": "handle", "configMapRef": {"name": "handlers"}}}
