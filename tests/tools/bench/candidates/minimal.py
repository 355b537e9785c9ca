"""The smallest program that does the same work in order: a floor, not a product."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.tools.bench.candidates.program import CHECKOUT, Publisher
from tests.tools.bench.candidates.targets import Topic

if TYPE_CHECKING:
    from tests.tools.bench.candidates.targets import Queue
    from tests.tools.bench.servers import Place


class Minimal(Publisher):
    """`peers/minimal_publisher.py` into a queue, `peers/minimal_producer.py` into a topic."""

    process = "worker"

    def __init__(self, target: Queue | Topic, batch: int, *, listen: bool = False) -> None:
        wakes = "woken by NOTIFY" if listen else "looks every 10 ms"
        super().__init__(
            f"minimal script, batch {batch}", f"{wakes}; no lease, no second owner, no failing messages", target
        )
        self._batch = batch
        self.notified = listen

    @override
    def start(self, place: Place) -> None:
        name = f"minimal-{self._batch}"
        self.target.open(place, name)
        if isinstance(self.target, Topic):
            program = ["minimal_producer", "--servers", self.target.servers, "--topic", name]
        else:
            program = ["minimal_publisher", "--port", str(place.broker.port), "--queue", name]
        command = [sys.executable, "-m", f"tests.tools.bench.peers.{program[0]}", *program[1:]]
        command += ["--database", place.database.uri(), "--batch", str(self._batch)]
        command += ["--listen"] if self.notified else []
        self.launch(command, place.folder / name, env={"PYTHONPATH": str(CHECKOUT)})
