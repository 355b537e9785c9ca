"""A worker as a real process: its files as they would be mounted, its HTTP contract, signals, and a clean end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox_core.config import ProcessorConfig
from outbox_core.report import Report
from tests.support import prefork
from tests.support.processes import freeze
from tests.support.servers.postgres import free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    import psycopg

    from tests.support.servers.postgres import Database

FAST: dict[str, Any] = {
    "pollInterval": "100ms",
    "leaseDuration": "2s",
    "retry": {"initialBackoff": "50ms", "maxBackoff": "200ms"},
}
"""Delivery for tests: the same behaviour in less time."""


def build_config(database: Database | None, target: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The operator's file for one processor; `delivery` is laid over FAST.

    Most tests compare the stored pair, so the cursor is named; `source={"cursor": None}` is a resource that names none.
    """
    resource = {"cluster": "test", "namespace": "shop", "name": "orders", "uid": "uid-orders"} | fields.pop(
        "resource", {}
    )
    source = {"connection": {"secretRef": {"name": "db"}}, "cursor": "TransactionOrder"}
    return {
        "resource": resource,
        "generation": fields.pop("generation", 1),
        "processorId": fields.pop("processor_id", "orders"),
        "source": source | fields.pop("source", {}),
        "delivery": FAST | fields.pop("delivery", {}),
        "target": target,
        **fields,
    }


@dataclass
class Worker:
    """One process, from start to exit."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | prefork.Process

    def get(self, path: str) -> tuple[int, str]:
        """The status and the body; OSError where there is no answer, or half of one: it may die as it writes."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as err:
            with err:
                return err.code, err.read().decode()
        except http.client.HTTPException as err:
            raise ConnectionAbortedError(f"{path}: {err!r}") from err

    def post_intent(self, intent: str) -> None:
        body = json.dumps({"intent": intent}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/intent", data=body, method="POST")
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.status == 200

    def report(self) -> Report:
        return Report.model_validate_json(self.get("/status")[1])

    def reports(self) -> dict[str, Report]:
        """Of a process with several processors: each one's, by its id."""
        found = [Report.model_validate(each) for each in json.loads(self.get("/status")[1])]
        return {each.processor_id: each for each in found}

    def wait_for_all(self, what: str, condition: Callable[[dict[str, Report]], bool], seconds: float = 60.0) -> None:
        """Poll /status of a process with several processors until the condition holds."""

        def holds() -> bool:
            assert self.process.poll() is None, f"the worker ended with {self.process.returncode}:\n{self.log()}"
            with contextlib.suppress(OSError):
                return condition(self.reports())
            return False

        wait_until(holds, what, seconds)

    def wait_for(self, what: str, condition: Callable[[Report], bool], seconds: float = 60.0) -> Report:
        """Poll /status until the condition holds; fail with the last report and the log."""
        last: list[Report] = []

        def holds() -> bool:
            assert self.process.poll() is None, f"the worker ended with {self.process.returncode}:\n{self.log()}"
            with contextlib.suppress(OSError):
                last[:] = [self.report()]
                return condition(last[0])
            return False

        try:
            wait_until(holds, what, seconds)
        except AssertionError as err:
            shown = last[0].model_dump_json(indent=1) if last else "no report"
            raise AssertionError(f"{err}\n{shown}\n{self.log()[-6000:]}") from err
        return last[0]

    def wait_state(self, state: str, reason: str | None = None, seconds: float = 60.0) -> Report:
        return self.wait_for(
            f"state {state}/{reason}",
            lambda report: report.state == state and (reason is None or report.reason == reason),
            seconds,
        )

    def watch(self, seconds: float) -> list[Report]:
        """What a reader sees who looks again and again."""
        seen, until = [], time.monotonic() + seconds
        while time.monotonic() < until:
            seen.append(self.report())
            time.sleep(0.02)
        return seen

    def log(self) -> str:
        return (self.directory / "log").read_text()

    def lines(self) -> list[dict[str, Any]]:
        """What the target `log` printed."""
        return [json.loads(line) for line in (self.directory / "out").read_text().splitlines()]

    def send(self, number: signal.Signals) -> None:
        """Send a signal; after SIGSTOP it has stopped."""
        self.process.send_signal(number)
        if number is signal.SIGSTOP and self.process.poll() is None:
            freeze(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self, seconds: float = 20.0) -> int:
        """SIGTERM, and the exit code."""
        self.process.terminate()
        return self.process.wait(seconds)

    def termination(self) -> Report:
        return Report.model_validate_json((self.directory / "termination-log").read_text())


@dataclass
class Workers:
    """Starts workers below one directory and ends them after the test."""

    directory: Path
    started: list[Worker] = field(default_factory=list)

    def prepare(
        self, config: dict[str, Any], uri: str, *, handler: str | None = None, target: str | None = None
    ) -> Path:
        """Write the files that a pod would have mounted; return their directory."""
        ProcessorConfig.model_validate(config)
        home = self.directory / f"pod-{len(list(self.directory.glob('pod-*')))}"
        for name in ("connections/source", "connections/target", "handler"):
            (home / name).mkdir(parents=True)
        (home / "processor.json").write_text(json.dumps(config))
        (home / "connections/source/uri").write_text(uri)
        if target is not None:
            (home / "connections/target/uri").write_text(target)
        if handler is not None:
            (home / "handler/orders.py").write_text(handler)
        (home / "termination-log").touch()
        return home

    def start_shared(self, configs: Iterable[dict[str, Any]], uri: str, *, target: str | None = None) -> Worker:
        """Start one process for several processors over files as their pod has them: the Secrets `db` and `mq`."""
        home = self.directory / f"pod-{len(list(self.directory.glob('pod-*')))}"
        for name in ("processors", "connections/db", "connections/mq", "handler"):
            (home / name).mkdir(parents=True)
        for config in configs:
            ProcessorConfig.model_validate(config)
            (home / "processors" / f"{config['resource']['name']}.json").write_text(json.dumps(config))
        (home / "connections/db/uri").write_text(uri)
        (home / "connections/mq/uri").write_text(target or "")
        (home / "termination-log").touch()
        return self.launch(home, "--processors", str(home / "processors"))

    def launch(
        self, home: Path, *arguments: str, pod: str | None = None, environment: dict[str, str] | None = None
    ) -> Worker:
        """Start a process over prepared files; with an environment of its own, which may be Python's, as a pod does."""
        port = free_port()
        chosen = [
            "--config", str(home / "processor.json"), "--connections", str(home / "connections"),
            "--handler", str(home / "handler"), "--termination-log", str(home / "termination-log"),
            "--port", str(port), *arguments,
        ]  # fmt: skip
        variables = os.environ | {"POD_NAME": pod or home.name, "POD_UID": f"uid-{home.name}"} | (environment or {})
        process: subprocess.Popen[bytes] | prefork.Process
        with (home / "log").open("ab") as log, (home / "out").open("ab") as out:
            if environment:
                command = [sys.executable, "-m", "outbox_worker", *chosen]
                process = subprocess.Popen(command, stdout=out, stderr=log, env=variables, cwd=home)
            else:
                process = prefork.server().start("outbox_worker", chosen, cwd=home, env=variables, out=out, err=log)
        worker = Worker(home, port, process)
        self.started.append(worker)
        return worker

    def start(
        self,
        config: dict[str, Any],
        uri: str,
        *arguments: str,
        handler: str | None = None,
        target: str | None = None,
        pod: str | None = None,
    ) -> Worker:
        """Prepare and launch."""
        return self.launch(self.prepare(config, uri, handler=handler, target=target), *arguments, pod=pod)

    def stop(self) -> None:
        for worker in self.started:
            if worker.process.poll() is None:
                worker.send(signal.SIGCONT)
                worker.kill()


class Effects:
    """What a projection made of messages, in the order in which it did, and the checkpoint beside it."""

    def __init__(self, connection: psycopg.Connection[Any], table: str) -> None:
        self.connection = connection
        self._table = table

    def handled(self) -> list[str]:
        rows = self.connection.execute(f"SELECT message_id FROM {self._table} ORDER BY n").fetchall()
        return [row[0] for row in rows]

    def count(self) -> int:
        row = self.connection.execute(f"SELECT count(*) FROM {self._table}").fetchone()
        return int(row[0]) if row else 0

    def wait_handled(self, expected: list[str], seconds: float = 60.0) -> None:
        """Wait for exactly these, once each and in order."""
        wait_until(lambda: self.count() >= len(expected), f"{len(expected)} messages handled", seconds)
        assert self.handled() == expected

    def stored(self, processor_id: str = "orders") -> str | None:
        row = self.connection.execute(
            "SELECT last_processed_transaction_id::text || ':' || last_processed_position "
            "FROM outbox.processor_checkpoints WHERE processor_id = %s",
            (processor_id,),
        ).fetchone()
        return None if row is None else str(row[0])

    def has_examined(self, last: str, processor_id: str = "orders") -> bool:
        """Whether the stored checkpoint, of either cursor, says that a pair is examined."""
        row = self.connection.execute(
            "SELECT CASE cursor_kind WHEN 'Snapshot' "
            "THEN coalesce(pg_visible_in_snapshot(t, lower_snapshot), false) "
            "OR coalesce(pg_visible_in_snapshot(t, upper_snapshot) AND p <= range_position, false) "
            "ELSE (last_processed_transaction_id, last_processed_position) = (t, p) END "
            "FROM outbox.processor_checkpoints, (SELECT %s::text::xid8 AS t, %s::bigint AS p) AS last "
            "WHERE processor_id = %s AND partition = 0",
            (*last.split(":"), processor_id),
        ).fetchone()
        return row is not None and row[0] is True


class Outbox(Effects):
    """A producer and a look at what became of its messages."""

    def __init__(self, database: Database) -> None:
        self.database = database
        super().__init__(database.direct(), "handled")
        self.connection.execute(
            "CREATE TABLE handled (n serial PRIMARY KEY, message_id text, total int, pod text DEFAULT '')"
        )

    def produce(self, count: int, *, start: int = 0, message_type: str = "OrderPlaced") -> list[str]:
        """Store messages in one transaction; return their ids."""
        rows = self.connection.execute(
            "INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data) "
            "SELECT 'shop', 'order-' || n %% 7, 'message-' || n, %s, jsonb_build_object('n', n, 'total', n * 10) "
            "FROM generate_series(%s::int, %s::int) AS n RETURNING message_id",
            (message_type, start + 1, start + count),
        ).fetchall()
        return [row[0] for row in rows]

    def produce_locked(self, count: int, start: int) -> tuple[list[str], psycopg.Connection[Any]]:
        """Store messages whose checkpoint cannot be stored before the session that is returned ends its transaction."""
        holder = self.database.direct(autocommit=False)
        with self.connection.transaction():
            ids = self.produce(count, start=start)
            # Its transaction id is above the messages': it holds the row, not the high-water mark.
            holder.execute("SELECT 1 FROM outbox.processor_checkpoints FOR UPDATE")
        return ids, holder

    def end_waiting_sessions(self) -> None:
        """End sessions that wait for a lock: one of a process that was killed would go on to its COMMIT.

        A checkpoint without effects is one message to the server, with its BEGIN and its COMMIT.
        """
        self.connection.execute("SELECT pg_terminate_backend(pid, 10000) FROM pg_locks WHERE NOT granted")

    def last(self) -> str:
        """The pair of the last message."""
        row = self.connection.execute(
            "SELECT transaction_id::text || ':' || position FROM outbox.messages "
            "ORDER BY transaction_id DESC, position DESC LIMIT 1"
        ).fetchone()
        assert row is not None
        return str(row[0])


SQL_TARGET = {
    "sql": {
        "statement": "INSERT INTO handled (message_id, total) "
        "SELECT message_id, (data->>'total')::int FROM batch ORDER BY ordinal"
    }
}
"""A projection into `handled`."""

PYTHON_TARGET = {"python": {"module": "orders", "function": "handle", "configMapRef": {"name": "handlers"}}}

PYTHON_HANDLER = """
import os
def handle(batch, connection):
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO handled (message_id, total, pod) VALUES (%s, %s, %s)",
            [(m.message_id, m.json()["total"], os.environ["POD_NAME"]) for m in batch],
        )
"""
"""The same by Python."""

PICKY_HANDLER = (
    PYTHON_HANDLER
    + """
    import pathlib
    bad = pathlib.Path("bad")
    if bad.exists() and any(m.partition_key == bad.read_text() for m in batch):
        raise RuntimeError("this key is not to be handled")
"""
)
"""The same; it refuses a batch that has messages of the key named in the file `bad`."""

GATED_HANDLER = (
    PYTHON_HANDLER
    + """
    import pathlib, time

    def is_held():
        try:
            key = pathlib.Path("hold").read_text()
        except FileNotFoundError:
            return False
        return not key or any(message.partition_key == key for message in batch)

    while is_held():
        pathlib.Path("entered").touch()
        time.sleep(0.01)
"""
)
"""The same, but it stays in the middle of the batch, between two statements, while the file `hold` is there.

Where that has a text it is a key: batches without it go on.
"""


@dataclass
class HandlerGate:
    """Keeps the handler of one worker in the middle of a batch."""

    directory: Path

    def close(self, key: str = "") -> None:
        (self.directory / "hold").write_text(key)

    def wait_entered(self) -> None:
        wait_until((self.directory / "entered").exists, "the handler is in the middle of a batch")

    def open(self) -> None:
        (self.directory / "hold").unlink()
        (self.directory / "entered").unlink(missing_ok=True)
