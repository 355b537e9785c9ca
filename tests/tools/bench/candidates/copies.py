"""A peer over copies of the messages, in a table of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.tools.bench import rows
from tests.tools.bench.candidates.program import ProgramCandidate

if TYPE_CHECKING:
    import psycopg

    from tests.support.servers.postgres import Database
    from tests.tools.bench.servers import Place

_CHUNK = 10_000


class CopiesCandidate(ProgramCandidate):
    """Its database, its rows, and how many of them it has finished.

    Attributes:
        insert: the statement that gives it rows, from a relation `row` (n, key, id, type, data).
        waiting: the statement that counts what it has not finished.
        clean: statements that remove what it keeps of finished messages.

    """

    copies = True
    insert: str
    waiting: str
    clean: tuple[str, ...]

    def __init__(self, name: str, settings: str) -> None:
        super().__init__(name, settings)
        self._given = 0
        self._connection: psycopg.Connection[Any] | None = None

    def make_database(self, place: Place) -> Database:
        """Make one of its own: two candidates of one product do not share a table."""
        database = place.databases.enter_context(place.servers.database(place.version, "empty_template"))
        self._connection = database.direct()
        return database

    @property
    def connection(self) -> psycopg.Connection[Any]:
        assert self._connection is not None
        return self._connection

    @override
    def add(self, first: int, last: int) -> None:
        self._given = last - first + 1
        for start in range(first, last + 1, _CHUNK):
            made = f"SELECT n, {rows.ROW} FROM generate_series({start}::bigint, {min(last, start + _CHUNK - 1)}) AS n"
            self.connection.execute(f"WITH row AS MATERIALIZED ({made}) {self.insert}")

    @override
    def count(self) -> int:
        """The target says how far it is; whether it is done says its own table."""
        self.check()
        handed = self.count_handed()
        if handed < self._given:
            return handed
        row = self.connection.execute(self.waiting).fetchone()
        return self._given - (row[0] if row else 0)

    @abstractmethod
    def count_handed(self) -> int:
        """Return how many messages its target has taken since `take`."""

    def forget(self) -> None:
        """Remove what it keeps of finished messages."""
        for statement in self.clean:
            self.connection.execute(statement)
