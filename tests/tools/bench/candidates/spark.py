"""Engine Spark, and Spark's own JDBC source: both write what they read as Parquet files."""

from __future__ import annotations

import os
import shutil
import sys
import uuid
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
from typing_extensions import override

from tests.support.spark import PATIENCE, SPARK_HOME, Drivers, spark_config
from tests.tools.bench import rows
from tests.tools.bench.candidates.program import CHECKOUT, ProgramCandidate, installed
from tests.tools.bench.case import Candidate
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from tests.support.worker import Worker
    from tests.tools.bench.servers import Place
    from tests.tools.ledger.account import Handled

_HEAP = "1g"
"""Of the JVM of each candidate."""


class Files:
    """A directory of Parquet files; those that are not committed are below a name that begins with `_`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir()
        self._counted: dict[Path, int] = {}

    def count(self) -> int:
        """Return how many rows the files have; the footer of each is read once."""
        for file in self._find():
            if file not in self._counted:
                self._counted[file] = pq.read_metadata(file).num_rows
        return sum(self._counted.values())

    def take(self) -> Iterable[Handled]:
        """Read the messages' numbers, and remove the files."""
        found = []
        for file in self._find():
            ids = pq.read_table(file, columns=["message_id"]).column(0).to_pylist()
            found += [rows.handled(int(each[2:])) for each in ids]
            file.unlink()
        self._counted.clear()
        return found

    def _find(self) -> list[Path]:
        """Spark moves a task's files into the directory of its write as that commits; ours come into the one above."""
        return [file for pattern in ("*.parquet", "[!_]*/*.parquet") for file in self.directory.glob(pattern)]


class OurSpark(Candidate):
    """A driver of ours with two threads as executors, and the target `parquet`."""

    ours = True
    order = Order.NONE

    def __init__(self) -> None:
        super().__init__("engine Spark", "looks every 200 ms")
        self._drivers: Drivers | None = None

    @override
    def start(self, place: Place) -> None:
        processor_id = f"p-{uuid.uuid4().hex[:8]}"
        folder = place.folder / processor_id
        folder.mkdir()
        self._files = Files(folder / "files")
        config = spark_config(
            place.database, folder, target={"parquet": {"path": str(self._files.directory)}},
            processor_id=processor_id, delivery={"leaseDuration": "5m", "pollInterval": "500ms"},
            resource={"cluster": "bench", "namespace": "bench", "name": processor_id, "uid": f"uid-{processor_id}"},
            spark={"config": {}},
        )  # fmt: skip
        config["delivery"].pop("batchSize")
        self._drivers = Drivers(folder, environment={"OUTBOX_SPARK_DRIVER_MEMORY": _HEAP})
        self._drivers.launch(self._drivers.prepare(config, place.database.uri()))
        self._driver().wait_for("the driver is at work", lambda report: report.state == "Active", PATIENCE)

    def _driver(self) -> Worker:
        assert self._drivers is not None
        return self._drivers.started[0]

    @override
    def pids(self) -> Mapping[str, int]:
        return {"worker": self._driver().process.pid} if self._drivers else {}

    @override
    def count(self) -> int:
        assert self._driver().process.poll() is None, f"{self.name!r} ended:\n{self._driver().log()[-3000:]}"
        return self._files.count()

    @override
    def take(self) -> Iterable[Handled]:
        return self._files.take()

    @override
    def stop(self) -> None:
        if self._drivers is not None:
            self._drivers.stop()


class SparkJdbc(ProgramCandidate):
    """A script that reads what is new by Spark's JDBC source, in two partitions by position."""

    order = Order.NONE

    def __init__(self) -> None:
        super().__init__("Spark, JDBC source", "two partitions by position, fetchsize 10000, looks every 10 ms")

    @override
    def start(self, place: Place) -> None:
        (driver,) = (installed("debezium") / "lib").glob("postgresql-*.jar")
        folder = place.folder / f"jdbc-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        self._files = Files(folder / "files")
        server = place.database.server
        command = [
            sys.executable, "-m", "tests.tools.bench.peers.spark_jdbc", place.database.uri(),
            f"jdbc:postgresql://127.0.0.1:{server.port}/{place.database.name}?user=postgres", str(driver),
            str(self._files.directory), _HEAP,
        ]  # fmt: skip
        paths = os.pathsep.join([str(CHECKOUT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.launch(command, folder, env={"SPARK_HOME": str(SPARK_HOME.resolve()), "PYTHONPATH": paths})

    @override
    def count(self) -> int:
        self.check()
        return self._files.count()

    @override
    def take(self) -> Iterable[Handled]:
        found = self._files.take()
        for each in self._files.directory.iterdir():
            shutil.rmtree(each)
        return found
