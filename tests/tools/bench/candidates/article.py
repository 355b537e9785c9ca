"""The loops of an article that the product descends from, "Scaling the Outbox Pattern (2B+ messages per day)".

Both mark rows of a table of their own as processed, and publish them to a queue of RabbitMQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from tests.tools.bench.candidates.copies import CopiesCandidate
from tests.tools.bench.candidates.program import CHECKOUT, installed
from tests.tools.bench.candidates.targets import Queue
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.tools.bench.servers import Place
    from tests.tools.ledger.account import Handled

_BATCH = "1000"


class _ArticleLoop(CopiesCandidate):
    """One program over the article's table."""

    insert = (
        "INSERT INTO outbox_messages (id, type, content, occurred_on) "
        "SELECT id, type, data, timestamptz '2026-01-01' + n * interval '1 millisecond' FROM row ORDER BY n"
    )
    waiting = "SELECT count(*) FROM outbox_messages WHERE processed_on IS NULL"
    clean = ("TRUNCATE outbox_messages",)

    def __init__(self, kind: str, name: str, settings: str) -> None:
        super().__init__(name, settings)
        self.queue: Queue = Queue(kind)

    def launch_over(self, place: Place, module: str, *arguments: str) -> None:
        """Start a module of `peers` with a database and a queue of its own."""
        name = module.replace("_", "-")
        self.queue.open(place, name)
        database = self.make_database(place).uri()
        program = [str(installed("python") / "bin" / "python"), "-m", f"tests.tools.bench.peers.{module}"]
        command = [*program, database, str(place.broker.port), name, *arguments]
        self.launch(command, place.folder / name, env={"PYTHONPATH": str(CHECKOUT)})

    @override
    def add(self, first: int, last: int) -> None:
        super().add(first, last)
        self.connection.execute("VACUUM ANALYZE outbox_messages")  # as the outbox is

    @override
    def count_handed(self) -> int:
        return self.queue.count()

    @override
    def take(self) -> Iterable[Handled]:
        found = list(self.queue.take())
        self.forget()
        return found

    @override
    def stop(self) -> None:
        super().stop()
        self.queue.close()


class NaiveLoop(_ArticleLoop):
    """`peers/article_naive.py`: one worker, in order."""

    def __init__(self, kind: str) -> None:
        super().__init__(
            kind, "article's naive loop",
            f"batch {_BATCH}, pika, each confirm awaited, an UPDATE for each row, no index, looks every 10 ms",
        )  # fmt: skip

    @override
    def start(self, place: Place) -> None:
        self.launch_over(place, "article_naive", _BATCH)


class OptimisedLoop(_ArticleLoop):
    """`peers/article_optimised.py`: several workers, in any order."""

    order = Order.NONE

    def __init__(self, kind: str, workers: int) -> None:
        super().__init__(
            kind, f"article's optimised loop, {workers} workers",
            f"batch {_BATCH}, py-amqp, partial index, SKIP LOCKED, all confirms of a batch awaited together, one "
            "UPDATE for a batch, threads of one process, looks every 10 ms; no order",
        )  # fmt: skip
        self._workers = workers

    @override
    def start(self, place: Place) -> None:
        self.launch_over(place, "article_optimised", _BATCH, str(self._workers))
