"""The smallest program that does the same work in order: a floor, not a product."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.support.servers.postgres import wait_until
from tests.tools.bench.candidates.targets import Queue
from tests.tools.bench.case import Candidate
from tests.tools.bench.processes import Program, start

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.tools.bench.servers import Place
    from tests.tools.ledger.account import Handled


class MinimalPublisher(Candidate):
    """`peers/minimal_publisher.py`, into a queue of its own."""

    def __init__(self, kind: str, batch: int) -> None:
        super().__init__(f"minimal script, batch {batch}", f"batch {batch}, no lease, no second owner, no failures")
        self._queue = Queue(kind)
        self._batch = batch
        self._program: Program | None = None

    @override
    def start(self, place: Place) -> None:
        name = f"minimal-{self._batch}"
        self._queue.open(place, name)
        log = place.folder / f"{name}.log"
        command = [
            sys.executable, "-m", "tests.tools.bench.peers.minimal_publisher", "--database", place.database.uri(),
            "--port", str(place.broker.port), "--queue", name, "--batch", str(self._batch),
        ]  # fmt: skip
        program = self._program = start(command, log)

        def ready() -> bool:
            program.check()
            return "ready" in program.log()

        wait_until(ready, "the minimal script is ready")

    @override
    def pids(self) -> Mapping[str, int]:
        return {"worker": self._program.pid} if self._program else {}

    @override
    def count(self) -> int:
        if self._program:
            self._program.check()
        return self._queue.count()

    @override
    def take(self) -> Iterable[Handled]:
        return self._queue.take()

    @override
    def stop(self) -> None:
        if self._program:
            self._program.stop()
        self._queue.close()
