"""The smallest program that does the same work in order: a floor, not a product."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.tools.bench.candidates.program import ProgramCandidate
from tests.tools.bench.candidates.targets import Queue, Stream, Topic

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.tools.bench.servers import Place
    from tests.tools.ledger.account import Handled

_CHECKOUT = Path(__file__).parents[4]


class MinimalPublisher(ProgramCandidate):
    """`peers/minimal_publisher.py`, into a queue of its own."""

    process = "worker"

    def __init__(self, kind: str, batch: int, *, listen: bool = False) -> None:
        wakes = "woken by NOTIFY" if listen else "looks every 10 ms"
        super().__init__(f"minimal script, batch {batch}", f"{wakes}; no lease, no second owner, no failing messages")
        self.queue: Queue = Stream() if kind == "stream" else Queue(kind)
        self._batch = batch
        self.notified = listen

    @override
    def start(self, place: Place) -> None:
        name = f"minimal-{self._batch}"
        self.queue.open(place, name)
        command = [
            sys.executable, "-m", "tests.tools.bench.peers.minimal_publisher", "--database", place.database.uri(),
            "--port", str(place.broker.port), "--queue", name, "--batch", str(self._batch),
            *(["--listen"] if self.notified else []),
        ]  # fmt: skip
        self.launch(command, place.folder / name, env={"PYTHONPATH": str(_CHECKOUT)})

    @override
    def count(self) -> int:
        self.check()
        return self.queue.count()

    @override
    def take(self) -> Iterable[Handled]:
        return self.queue.take()

    @override
    def stop(self) -> None:
        super().stop()
        self.queue.close()


class MinimalProducer(ProgramCandidate):
    """`peers/minimal_producer.py`, into a topic of its own."""

    process = "worker"

    def __init__(self, batch: int) -> None:
        super().__init__(
            f"minimal script, batch {batch}", "looks every 10 ms; no lease, no second owner, no failing messages"
        )
        self._topic = Topic()
        self._batch = batch

    @override
    def start(self, place: Place) -> None:
        name = f"minimal-{self._batch}"
        self._topic.open(place, name)
        command = [
            sys.executable, "-m", "tests.tools.bench.peers.minimal_producer", "--database", place.database.uri(),
            "--servers", self._topic.servers, "--topic", name, "--batch", str(self._batch),
        ]  # fmt: skip
        self.launch(command, place.folder / name, env={"PYTHONPATH": str(_CHECKOUT)})

    @override
    def count(self) -> int:
        self.check()
        return self._topic.count()

    @override
    def take(self) -> Iterable[Handled]:
        return self._topic.take()

    @override
    def stop(self) -> None:
        super().stop()
        self._topic.close()
