"""The observer: a process that looks and never writes into the database.

It samples checkpoints and leases straight from the server, and takes what reaches each broker's tap queue. What changed
since the last look becomes a line of JSON: `{"at", "kind", "case", "partition", …}`, `at` in seconds since 1970.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final, LiteralString

import psycopg

from tests.tools.chaos.cases import CHECKPOINTS, Case, Target, select_cases
from tests.tools.ledger.amqp import Broker, BrokerError

LOOK_SECONDS: Final = 0.05
LEASES: Final[LiteralString] = """
SELECT processor_id, partition, epoch, pod, token::text FROM outbox.processor_leases
 WHERE token IS NOT NULL AND expires_at > clock_timestamp()
"""


DIVISIONS: Final[LiteralString] = "SELECT processor_id, partition_count, next_count FROM outbox.processor_partitions"


_DOWN: Final = (psycopg.OperationalError, psycopg.InternalError, psycopg.InterfaceError)
"""A server that is crashed, full or not there, and what its crash leaves of a connection."""


class Journal:
    """The observer's file."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def write(self, kind: str, case: str, **what: Any) -> None:
        line = json.dumps({"at": round(time.time(), 4), "kind": kind, "case": case, **what}, separators=(",", ":"))
        with self._lock:
            self._file.write(line + "\n")

    def flush(self) -> None:
        with self._lock:
            self._file.flush()


class Sampler:
    """Looks at one database."""

    def __init__(self, uri: str, cases: tuple[Case, ...], journal: Journal) -> None:
        self._uri = uri
        self._names = {case.name for case in cases}
        self._journal = journal
        self._last: dict[tuple[str, str, int], Any] = {}

    def run(self, stopping: threading.Event) -> None:
        """Look until it is time to stop; a server that is down is looked for again.

        Raises:
            psycopg.Error: the server does not understand the question: what cannot be seen must not pass as kept.

        """
        while not stopping.is_set():
            with contextlib.suppress(*_DOWN), self._connect() as connection:
                while not stopping.wait(LOOK_SECONDS):
                    self._look(connection)
            stopping.wait(LOOK_SECONDS)

    def _connect(self) -> psycopg.Connection[Any]:
        return psycopg.connect(self._uri, autocommit=True, connect_timeout=5, application_name="observer")

    def _look(self, connection: psycopg.Connection[Any]) -> None:
        for case, partition, numbers in connection.execute(CHECKPOINTS):
            self._note("checkpoint", case, partition, {"place": [int(number) for number in numbers]})
        for case, count, asked in connection.execute(DIVISIONS):
            self._note("partitioning", case, 0, {"count": count, "asked": asked})
        for case, partition, epoch, pod, token in connection.execute(LEASES):
            self._note("lease", case, partition, {"epoch": epoch, "pod": pod, "token": token})
        self._journal.flush()

    def _note(self, kind: str, case: str, partition: int, what: dict[str, Any]) -> None:
        if case in self._names and self._last.get((kind, case, partition)) != what:
            self._last[kind, case, partition] = what
            self._journal.write(kind, case, partition=partition, **what)


def tap(case: Case, port: int, journal: Journal, stopping: threading.Event) -> None:
    """Take what comes to the case's tap queue, for its time; the ledger's own queue is not touched."""
    while not stopping.is_set():
        with (
            contextlib.suppress(OSError, BrokerError),
            Broker("127.0.0.1", port, "tests", "s3cret word") as broker,
        ):
            for delivery in broker.consume(f"tap-{case.name}"):
                handled = delivery.as_handled()
                journal.write("tap", case.name, key=handled.key, message=handled.message_id)
        stopping.wait(LOOK_SECONDS)


def main() -> None:
    """Look until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True, help="URI of the database that has the messages")
    parser.add_argument("--reporting", default="", help="URI of the database of cases whose effects are apart")
    parser.add_argument("--broker", type=int, default=0, help="port")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--journal", type=Path, required=True)
    arguments = parser.parse_args()
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    cases = select_cases(arguments.case)
    with arguments.journal.open("w", encoding="utf-8") as file:
        journal = Journal(file)
        looks = [(arguments.source, [case for case in cases if not case.apart])]
        looks += [(arguments.reporting, [case for case in cases if case.apart])] if arguments.reporting else []
        taps = [
            threading.Thread(target=tap, args=(case, arguments.broker, journal, stopping), daemon=True)
            for case in cases
            if case.target is Target.RABBITMQ
        ]
        for thread in taps:
            thread.start()
        with ThreadPoolExecutor(len(looks)) as pool:
            sampling = [pool.submit(Sampler(uri, tuple(seen), journal).run, stopping) for uri, seen in looks]
        for one in sampling:
            one.result()


if __name__ == "__main__":
    main()
