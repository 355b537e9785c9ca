"""The product: one worker process, or several, over the outbox."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.support.worker import Workers, build_config
from tests.tools.bench.candidates.targets import Queue
from tests.tools.bench.case import Candidate
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.support.worker import Worker
    from tests.tools.bench.candidates.targets import Target
    from tests.tools.bench.servers import Place
    from tests.tools.ledger.account import Handled

_PAUSED = "5m"
"""How long a paused worker stays the owner."""


class OurWorker(Candidate):
    """The worker with the product's defaults, but for `delivery` and for leases that outlast a pause.

    With `baseline` it is what others of ours are compared with. One that is never paused has the default lease.
    """

    def __init__(
        self,
        name: str,
        target: Target,
        *,
        delivery: dict[str, Any] | None = None,
        source: dict[str, Any] | None = None,
        start_from: Mapping[str, Any] | None = None,
        processes: int = 1,
        order: Order = Order.TOTAL,
        baseline: bool = False,
        paused: bool = True,
    ) -> None:
        super().__init__(name, _describe(delivery, source, processes))
        self.ours = not baseline
        self.queue = target if isinstance(target, Queue) else None
        self.order = order
        self._target = target
        self._delivery = _lay_over_defaults(delivery or {}, paused=paused)
        self._source = source or {}
        self._start_from = start_from or {"type": "Beginning"}
        self._processes = processes
        self._workers: Workers | None = None

    @override
    def start(self, place: Place) -> None:
        processor_id = f"p-{uuid.uuid4().hex[:8]}"
        self._target.open(place, processor_id)
        resource = {"cluster": "bench", "namespace": "bench", "name": processor_id, "uid": f"uid-{processor_id}"}
        config = build_config(
            None, self._target.spec(), resource=resource, processor_id=processor_id,
            source={"cursor": None} | self._source, delivery=self._delivery, startFrom=self._start_from,
        )  # fmt: skip
        folder = place.folder / processor_id
        folder.mkdir()
        self._workers = Workers(folder)
        for number in range(self._processes):
            home = self._workers.prepare(
                config, place.database.uri(), handler=self._target.handler, target=self._target.uri()
            )
            self._target.write_files(home / "connections")
            # With an environment of its own it is a Python of its own, not one forked from the test's.
            name = f"{processor_id}-{number}"
            self._workers.launch(home, environment={"POD_NAME": name, "POD_UID": f"uid-{name}"})
        for worker in self._workers.started:
            worker.wait_for("the worker is at work", lambda report: report.state == "Active")

    @override
    def pids(self) -> Mapping[str, int]:
        started = self._started()
        if len(started) == 1:
            return {"worker": started[0].process.pid}
        return {f"worker {number}": each.process.pid for number, each in enumerate(started, 1)}

    @override
    def count(self) -> int:
        for worker in self._started():
            assert worker.process.poll() is None, f"the worker {self.name!r} ended:\n{worker.log()[-3000:]}"
        return self._target.count()

    @override
    def take(self) -> Iterable[Handled]:
        return self._target.take()

    @override
    def stop(self) -> None:
        if self._workers is not None:
            self._workers.stop()
        self._target.close()

    def _started(self) -> list[Worker]:
        return self._workers.started if self._workers else []


def _lay_over_defaults(delivery: dict[str, Any], *, paused: bool) -> dict[str, Any]:
    """`build_config` makes waits short for tests; here they are the product's own, but for the lease."""
    plain: dict[str, Any] = {"pollInterval": "500ms", "leaseDuration": "15s", "retry": {}}
    lease = {"leaseDuration": _PAUSED} if paused else {}
    if delivery.get("mode") == "Competing":
        return plain | delivery | {"competing": lease}
    return plain | lease | delivery


def _describe(delivery: dict[str, Any] | None, source: dict[str, Any] | None, processes: int) -> str:
    said = [f"{name}: {value}" for name, value in {**(source or {}), **(delivery or {})}.items()]
    return ", ".join([*said, *([f"{processes} processes"] if processes > 1 else [])]) or "defaults"
