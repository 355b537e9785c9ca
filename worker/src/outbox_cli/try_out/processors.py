"""The three processors of the run, and their worker processes.

A worker process is the one of a pod: `outbox_worker.main` with a configuration file, a connection's files, a log and an
HTTP port. It is forked from the run's process, so that it need not import anything.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import uuid
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from outbox_cli.try_out.ledger import Order

if TYPE_CHECKING:
    from outbox_cli.try_out.guard import Children
    from outbox_cli.try_out.place import Place

LEASE: Final = "3s"
TOTALS: Final = "orders-totals"
LOYALTY: Final = "orders-loyalty"
PARCELS: Final = "orders-parcels"
_RESTART_AFTER: Final = 1.0
"""Seconds; a pod's restart takes about as long."""
_TOTALS_STATEMENT: Final = """
WITH line AS (
  INSERT INTO shop.totals_lines (message_id, partition_key)
  SELECT message_id, partition_key FROM batch ORDER BY ordinal
)
INSERT INTO shop.order_totals AS total (order_key, messages, cents)
SELECT coalesce(partition_key, message_id), count(*),
       sum(CASE WHEN jsonb_typeof(data->'cents') = 'number' THEN (data->>'cents')::numeric ELSE 0 END)
  FROM batch GROUP BY 1 ORDER BY 1
ON CONFLICT (order_key) DO UPDATE
  SET messages = total.messages + excluded.messages, cents = total.cents + excluded.cents
"""
_PARCELS_STATEMENT: Final = """
INSERT INTO shop.parcels_lines (message_id, partition_key) SELECT message_id, partition_key FROM batch
"""


@dataclass(frozen=True, slots=True)
class Processor:
    """One of the three.

    Attributes:
        lines: the table in which each handled message leaves a line.
        order: what the ledger asks of the order of these lines.

    """

    processor_id: str
    mode: str
    replicas: int
    lines: str
    order: Order
    spec: dict[str, Any]

    @property
    def waits(self) -> bool:
        """Say whether an open transaction holds it back."""
        return bool(self.spec["source"].get("cursor") == "TransactionOrder")


def build_processors() -> tuple[Processor, ...]:
    """Say what runs."""
    source = {"connection": {"secretRef": {"name": "shop"}}}
    delivery = {"pollInterval": "100ms", "leaseDuration": LEASE}
    return (
        Processor(
            TOTALS, "Ordered", 2, "shop.totals_lines", Order.ALL,
            {
                "source": source | {"cursor": "TransactionOrder"},
                "delivery": delivery,
                "target": {"sql": {"statement": _TOTALS_STATEMENT}},
            },
        ),
        Processor(
            LOYALTY, "Partitioned", 2, "shop.loyalty_lines", Order.KEY,
            {
                "source": source | {"cursor": "Snapshot"},
                "delivery": delivery | {"mode": "Partitioned", "partitions": {"count": 4}},
                "target": {"python": {"module": "loyalty", "function": "handle"}},
            },
        ),
        Processor(
            PARCELS, "Competing", 1, "shop.parcels_lines", Order.NONE,
            {
                "source": source,
                "delivery": delivery | {"mode": "Competing", "competing": {"leaseDuration": LEASE}},
                "target": {"sql": {"statement": _PARCELS_STATEMENT}},
            },
        ),
    )  # fmt: skip


def lay_out(place: Place, processors: tuple[Processor, ...], uri: str) -> None:
    """Write the files that a pod would have mounted."""
    (place.connections / "source" / "uri").write_text(uri)
    code = resources.files("outbox_cli.try_out").joinpath("loyalty.py").read_text()
    (place.handler / "loyalty.py").write_text(code)
    for processor in processors:
        resource = {
            "cluster": "try", "namespace": "shop", "name": processor.processor_id,
            "uid": str(uuid.uuid5(uuid.NAMESPACE_DNS, processor.processor_id)),
        }  # fmt: skip
        config = {"resource": resource, "generation": 1, "processorId": processor.processor_id, **processor.spec}
        (place.folder / f"{processor.processor_id}.json").write_text(json.dumps(config, indent=1))


@dataclass(slots=True)
class Worker:
    """One worker process, and the one that follows when it ends."""

    processor: Processor
    number: int
    children: Children
    place: Place
    pid: int = 0
    port: int | None = None
    ended_at: float | None = None
    report: dict[str, Any] = field(default_factory=dict)
    handled_before: int = 0
    """By processes that ended."""
    _read: int = 0

    @property
    def name(self) -> str:
        """As its pod would be called."""
        return f"{self.processor.processor_id}-{self.number}"

    @property
    def handled(self) -> int:
        """Messages that it has handled."""
        return self.handled_before + int(self.report.get("handled", 0))

    @property
    def is_owner(self) -> bool:
        """Say whether it holds the lease of a processor that has one owner."""
        return bool((self.report.get("lease") or {}).get("held")) and self.processor.mode == "Ordered"

    def start(self) -> None:
        """Start a process."""
        log = self.children.log(self.name)
        self._read = log.stat().st_size if log.exists() else 0
        self.port, self.ended_at, self.report = None, None, {}
        self.pid = self.children.start(self.name, self._work)

    def note_end(self) -> None:
        """Remember that it ended."""
        self.handled_before = self.handled
        self.report, self.pid, self.port = {}, 0, None
        self.ended_at = time.monotonic()

    def is_due(self) -> bool:
        """Say whether it is time to start it again."""
        return self.ended_at is not None and time.monotonic() - self.ended_at >= _RESTART_AFTER

    def ask(self) -> None:
        """Fetch its report; keep the last one where it does not answer."""
        if self.port is None:
            self.port = self._find_port()
        if self.port is None or not self.pid:
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=0.5)
        try:
            connection.request("GET", "/status")
            self.report = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            pass
        finally:
            connection.close()

    def _find_port(self) -> int | None:
        """Read it from the first lines of its log."""
        try:
            with self.children.log(self.name).open("rb") as log:
                log.seek(self._read)
                lines = log.read(4096).decode(errors="replace").splitlines()
        except OSError:
            return None
        for line in lines:
            if '"port"' in line and line.endswith("}"):
                return int(json.loads(line).get("port", 0)) or None
        return None

    def _work(self) -> int:
        """Be the worker."""
        import logging

        from outbox_worker.main import main

        os.environ |= {"POD_NAME": self.name, "POD_UID": str(uuid.uuid4()), "OUTBOX_GRACE_SECONDS": "4"}
        place = self.place
        config = place.folder / f"{self.processor.processor_id}.json"
        code = main(
            [
                "--config", str(config), "--connections", str(place.connections), "--handler", str(place.handler),
                "--termination-log", str(place.folder / "none"), "--host", "127.0.0.1", "--port", "0",
            ]
        )  # fmt: skip
        logging.shutdown()
        return code


def import_worker() -> None:
    """Import everything that a worker of these processors needs, before it is forked."""
    import gc

    import outbox_worker.main
    import outbox_worker.targets.python
    import outbox_worker.targets.sql  # noqa: F401

    gc.freeze()  # what is shared between the processes stays shared
