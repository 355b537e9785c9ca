"""PostgreSQL as chaos needs it: durable, on a small volume of its own, stopped without warning and started again.

The volume is a tmpfs in the private mount namespace of `tests.tools.chaos.__main__`: it goes with the process, and a
full one fills nothing of the machine's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psycopg
from psycopg import sql

from outbox_sql import runner
from tests.support.servers.postgres import DEFAULT_VERSION, SCHEMA, PgBouncer, binaries, wait_until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.chaos.cases import Case

SOURCE_PORT: Final = 5432
"""In a network namespace of our own."""
REPORTING_PORT: Final = 5433
_SETTINGS: Final = {
    "listen_addresses": "'127.0.0.1'",
    "unix_socket_directories": "''",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "track_commit_timestamp": "on",  # when an effect came, whatever the worker's clock says
    "min_wal_size": "32MB",
    "max_wal_size": "96MB",
    "autovacuum_naptime": "5s",
    "lc_messages": "'C'",
    "timezone": "'UTC'",
}
_SCHEMA_FILE: Final = Path(__file__).with_name("schema.sql")
SABOTAGE: Final = Path(__file__).with_name("sabotage")
_TABLE: Final = """
CREATE TABLE chaos.{table} (handled_id bigserial PRIMARY KEY, message_id text, order_key text, order_sequence integer,
    cents integer, partition integer, epoch bigint, holder text,
    handler text DEFAULT chaos.worker_of(current_setting('application_name')));
CREATE TRIGGER pass_gate BEFORE INSERT ON chaos.{table} FOR EACH STATEMENT EXECUTE FUNCTION chaos.pass_gate({name})
"""
_BACKENDS: Final = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' ORDER BY pid"
_BURN: Final = """
CREATE TABLE chaos.burned (n integer);
DO $$ BEGIN
    FOR n IN 1..{} LOOP
        BEGIN
            INSERT INTO chaos.burned VALUES (n);
        EXCEPTION WHEN division_by_zero THEN NULL;
        END;
    END LOOP;
END $$;
DROP TABLE chaos.burned
"""
"""A block with a handler is a subtransaction, and takes an id of its own."""


class Postgres:
    """One server; fsync and synchronous_commit are on, as users have them."""

    def __init__(self, directory: Path, *, port: int, megabytes: int) -> None:
        """Mount the volume, make the server and start it."""
        self.port = port
        directory.mkdir()
        directory.chmod(0o755)
        self._programs = binaries(os.environ.get("OUTBOX_CHAOS_POSTGRES", DEFAULT_VERSION))
        self._volume = directory / "volume"
        self._data = self._volume / "data"
        self._log = directory / "postgres.log"
        self._ballast = self._volume / "ballast"
        self._lock = threading.RLock()
        self._volume.mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", str(self._volume)], check=True
        )
        self._log.touch()
        for path in (self._volume, self._log):
            shutil.chown(path, "postgres", "postgres")
        self._run("initdb", "-D", str(self._data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C")
        with (self._data / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{name} = {value}\n" for name, value in (*_SETTINGS.items(), ("port", str(port))))
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"]
        subprocess.run(
            [*user, str(self._programs / program), *arguments], check=True, cwd=self._volume,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def uri(self, database: str = "outbox", *, port: int | None = None) -> str:
        """Past every proxy, or through the one at a port."""
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/{database}?sslmode=disable"

    def connect(self, database: str = "outbox") -> psycopg.Connection[Any]:
        """Connect past every proxy."""
        return psycopg.connect(
            self.uri(database), autocommit=True, connect_timeout=5, application_name="chaos", prepare_threshold=None
        )

    def start(self) -> None:
        """Start it, if it is not running, and wait until it answers."""
        with self._lock:
            if not self.is_running():
                self._run("pg_ctl", "-D", str(self._data), "-l", str(self._log), "-W", "start")
            wait_until(self._answers, "PostgreSQL answers", 120)

    def crash(self) -> None:
        """Let every process of it end at once, as when the power is cut but for the disk."""
        with self._lock, contextlib.suppress(subprocess.CalledProcessError):
            self._run("pg_ctl", "-D", str(self._data), "-m", "immediate", "-w", "stop")

    def kill_backend(self, choice: float) -> float:
        """SIGKILL one of its backends, `choice` of all; return after how many seconds it answers again.

        Raises:
            psycopg.Error: it does not answer now.

        """
        with self._lock:
            with self.connect("postgres") as look:
                pids = [int(pid) for (pid,) in look.execute(_BACKENDS).fetchall()]
                os.kill(pids[int(choice * len(pids))], signal.SIGKILL)
                began = time.monotonic()
                with contextlib.suppress(psycopg.Error):
                    look.execute("SELECT pg_sleep(60)")  # until it is ended like all others
            wait_until(self._answers, "PostgreSQL answers", 120)
            return time.monotonic() - began

    def is_running(self) -> bool:
        """Whether its main process is there."""
        try:
            self._run("pg_ctl", "-D", str(self._data), "status")
        except subprocess.CalledProcessError:
            return False
        return True

    def fill(self, *, leave: int) -> None:
        """Leave only so many bytes on its volume."""
        with self._ballast.open("wb") as ballast:
            free = os.statvfs(self._volume)
            with contextlib.suppress(OSError):
                os.posix_fallocate(ballast.fileno(), 0, max(4096, free.f_bavail * free.f_frsize - leave))

    def free(self) -> None:
        """Give the space back; a server that ended for want of it is started, as a person would."""
        self._ballast.unlink(missing_ok=True)
        deadline = time.monotonic() + 3
        while not self._answers():
            if time.monotonic() > deadline or not self.is_running():
                self.start()
                return
            time.sleep(0.05)

    def close(self) -> None:
        """End it, and take the volume away."""
        self.crash()
        subprocess.run(["umount", "--lazy", str(self._volume)], check=True)

    def _answers(self) -> bool:
        try:
            with psycopg.connect(self.uri("postgres"), connect_timeout=2):
                return True
        except psycopg.Error:
            return False

    def prepare(self, cases: Sequence[Case], queues: Sequence[str] = (), sabotage: str = "") -> None:
        """Make the database, with the product's schema and ours, and a table of effects for each case that has one."""
        with self.connect("postgres") as admin:
            admin.execute("CREATE DATABASE outbox")
        with self.connect() as connection:
            runner.migrate(connection, SCHEMA)
            connection.execute(_SCHEMA_FILE.read_text())
            if sabotage:
                connection.execute((SABOTAGE / f"{sabotage}.sql").read_text())
            for queue in queues:
                connection.execute("SELECT outbox.create_queue(%s)", [queue])
            for each in chain(cases, *(case.companions for case in cases)):
                if each.target.is_database:
                    connection.execute(
                        sql.SQL(_TABLE).format(table=sql.Identifier(each.table), name=sql.Literal(each.name))
                    )

    def burn(self, transactions: int) -> None:
        """Use up so many transaction ids, so that this server's are not the other's."""
        with self.connect() as connection:
            connection.execute(_BURN.format(transactions))


class Databases:
    """The source, which has the messages, and the server of those cases whose effects are apart from them."""

    def __init__(self, directory: Path, cases: Sequence[Case], *, megabytes: int, sabotage: str, burned: int) -> None:
        """Start and prepare what the cases need."""
        apart = [case for case in cases if case.apart]
        queues = [case.queue for case in cases if case.queue]
        self.source = Postgres(directory / "source", port=SOURCE_PORT, megabytes=megabytes)
        self.source.prepare([case for case in cases if not case.apart], queues, sabotage)
        self.pool: PgBouncer | None = None
        if any(case.pooled for case in cases):
            self.pool = PgBouncer(self.source)
        self.reporting: Postgres | None = None
        if apart:
            self.reporting = Postgres(directory / "reporting", port=REPORTING_PORT, megabytes=megabytes)
            self.reporting.prepare(apart, (), sabotage)
            self.reporting.burn(burned)

    def way_to_source(self, case: Case) -> int:
        """Return the port by which the case's workers get to the messages: the server's, or the pool's before it."""
        return self.pool.port if case.pooled and self.pool is not None else self.source.port

    def home(self, case: Case) -> Postgres:
        """Return the server that has the case's effects, checkpoints and leases."""
        return self.reporting if case.apart and self.reporting is not None else self.source

    def all(self) -> list[Postgres]:
        """Return every server that there is."""
        return [self.source] if self.reporting is None else [self.source, self.reporting]
