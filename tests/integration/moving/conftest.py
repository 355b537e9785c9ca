"""Two databases: messages in one, a projection with its checkpoint in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.worker import Effects, build_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.servers.postgres import Database, Servers
    from tests.support.worker import Outbox, Worker, Workers

STATEMENT = (
    "INSERT INTO seen (message_id, total, pair) SELECT message_id, (data->>'total')::int, "
    "transaction_id || ':' || position FROM batch ORDER BY transaction_id, position"
)


class Apart(Effects):
    """A source's database and a target's, as a worker is given them."""

    def __init__(self, outbox: Outbox, target: Database, workers: Workers, cursor: str = "TransactionOrder") -> None:
        super().__init__(target.direct(), "seen")
        self.outbox, self.target, self.workers, self.cursor = outbox, target, workers, cursor
        self.connection.execute("CREATE TABLE seen (n serial PRIMARY KEY, message_id text, total int, pair text)")

    def config(self, statement: str = STATEMENT, **fields: Any) -> dict[str, Any]:
        target = fields.pop("target", None) or {"sql": {"statement": statement}}
        for chosen in target.values():
            chosen.setdefault("connection", {"secretRef": {"name": "reporting"}})
        source = {"cursor": self.cursor} | fields.pop("source", {})
        return build_config(self.outbox.database, target, source=source, **fields)

    def prepare(self, *, handler: str | None = None, source_uri: str = "", target_uri: str = "", **fields: Any) -> Path:
        return self.workers.prepare(
            self.config(**fields),
            source_uri or self.outbox.database.uri(),
            target=target_uri or self.target.uri(),
            handler=handler,
        )

    def start(self, *arguments: str, pod: str | None = None, **fields: Any) -> Worker:
        return self.workers.launch(self.prepare(**fields), *arguments, pod=pod)


@pytest.fixture
def cursor(request: pytest.FixtureRequest) -> str:
    """By which cursor processors read; `BOTH` makes a test run with each."""
    return str(getattr(request, "param", "TransactionOrder"))


BOTH = pytest.mark.parametrize("cursor", ["TransactionOrder", "Snapshot"], indirect=True)


@pytest.fixture
def apart(outbox: Outbox, servers: Servers, workers: Workers, cursor: str) -> Iterator[Apart]:
    """Another database, of which nothing is ours yet."""
    with servers.database(template="empty_template") as target:
        yield Apart(outbox, target, workers, cursor)
