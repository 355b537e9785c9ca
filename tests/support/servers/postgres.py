"""Real PostgreSQL servers of several versions, PgBouncer before one of them, and a fresh migrated database per test.

Servers start on first use, once a session, on a free port with a directory of their own, and end with the test
process (also when it is killed: the kernel sends them SIGINT). `tests/tools/cluster/setup.sh postgres` puts the
programs in the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import uuid4

import psycopg
import pytest
from psycopg import sql

from outbox_core.spec import Source
from outbox_sql import runner
from outbox_worker.postgres.connection import ConnectionFiles
from tests.support.cache import find_cached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMA = "outbox"
VERSIONS = ("14", "15", "18")
DEFAULT_VERSION = "15"
POOLED = "pgbouncer"
DAILY_VERSION = "18"
"""What `make test` uses where the server does not matter: the newest, because other layers use the default one."""


def mostly_nightly(*kinds: str) -> list[Any]:
    """Parameters of a fixture: `make test` uses DAILY_VERSION, `make test-all` every one."""
    return [pytest.param(kind, marks=() if kind == DAILY_VERSION else pytest.mark.nightly) for kind in kinds]


EVERYWHERE = pytest.mark.parametrize("each_database", [*VERSIONS, POOLED], indirect=True)
"""Where the server matters (locks, snapshots, fence, ownership), `make test` uses every version and PgBouncer too."""
ROLES = ("owner", "producer", "processor", "stranger")
"""Logins without a right of their own; `locked` needs the password `open sesame`."""

_DISK = Path("/tmp")
_ROOM = 12 * 2**30
"""Bytes; the servers of 3,000 tests in five processes took 1.5 GiB at most."""
_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",
    "synchronous_commit": "off",
    "full_page_writes": "off",
    "autovacuum": "off",  # its ANALYZE takes transaction ids, which moves the bound under a test
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "shared_buffers": "64MB",
    "lc_messages": "C",
    "timezone": "UTC",
}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Poll until the condition holds; fail with what was waited for.

    Less often the longer it takes: a look is a query or an HTTP request, and a hundred a second take a sixth of a core.
    """
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        if waited > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(min(0.01 + waited / 10, 0.2))


# Each process begins elsewhere, also where its `random` has a fixed seed.
_turns = itertools.count(secrets.randbelow(19_000))
_chosen: deque[int] = deque()
_HELD = 200
"""Ports that are held: meanwhile their servers begin to listen."""


def free_port() -> int:
    """Choose a port for a server that is started later.

    Those that the kernel hands out lie above: on a busy machine one of them is soon taken. No port is chosen twice, by
    this process or by another one: a socket with its number as a name says that it is chosen.
    """
    while True:
        port = 11_000 + next(_turns) % 19_000
        chosen = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            chosen.bind(f"\0outbox-operator-tests-{port}")
            probe.bind(("", port))
            _chosen.append(chosen.detach())  # the end of the process closes it
            if len(_chosen) > _HELD:
                os.close(_chosen.popleft())
            return port
        chosen.close()


def binaries(version: str) -> Path:
    return find_cached("postgres", "postgres", version, "bin").resolve()


def _as_server_user(command: list[str]) -> list[str]:
    """A server refuses to run as root, and must not outlive the tests."""
    user = ["--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.geteuid() == 0 else []
    return ["setpriv", *user, "--pdeathsig=INT", *command]


def find_memory() -> Path:
    """Return where directories lie in memory; where little of it is free, on the disk.

    ext4 gives a file no inode that was freed in the last seconds, and looks for others: on it, to make and drop the
    databases of thousands of tests takes up to ten times as long.
    """
    memory = Path("/dev/shm")
    has_room = memory.is_dir() and shutil.disk_usage(memory).free >= _ROOM
    return memory if has_room else _DISK


def _own_directory(prefix: str, parent: Path = _DISK) -> Path:
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    if os.geteuid() == 0:
        shutil.chown(directory, "postgres", "postgres")
    return directory


class Daemon:
    """A server process in a directory of its own."""

    def __init__(self, name: str, port: int, directory: Path, command: list[str]) -> None:
        self.port = port
        self.directory = directory
        self._command = command
        self._name = name
        self.start()

    def start(self) -> None:
        """Run it; again, once it has ended."""
        with (self.directory / "log").open("a") as log:
            self._process = subprocess.Popen(
                _as_server_user(self._command), stdout=log, stderr=subprocess.STDOUT, cwd=self.directory
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, probe: Callable[[], object]) -> None:
        def answers() -> bool:
            assert self._process.poll() is None, (self.directory / "log").read_text()
            with contextlib.suppress(psycopg.OperationalError):
                probe()
                return True
            return False

        wait_until(answers, f"{self._name} answers")

    def stop(self) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)


class PostgresServer:
    """One server with a migrated template database; `settings` are laid over those that make tests fast."""

    def __init__(self, version: str, settings: dict[str, str] | None = None, parent: Path = _DISK) -> None:
        self.version = version
        programs = binaries(version)
        directory = _own_directory(f"outbox-pg{version}-", parent)
        data = directory / "data"
        subprocess.run(
            _as_server_user(
                [
                    str(programs / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8",
                    "--locale=C", "-N",
                ]
            ),
            check=True, capture_output=True, cwd=directory,
        )  # fmt: skip
        hba = data / "pg_hba.conf"
        hba.write_text("host all locked 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n")
        chosen = [f"--{name}={value}" for name, value in (_SETTINGS | (settings or {})).items()]
        port = free_port()
        self._daemon = Daemon(
            f"PostgreSQL {version}",
            port,
            directory,
            [str(programs / "postgres"), "-D", str(data), "-p", str(port), "-k", str(directory), *chosen],
        )
        self._daemon.wait_ready(lambda: self.connect("postgres").close())
        self._prepare()

    @property
    def port(self) -> int:
        return self._daemon.port

    @property
    def pid(self) -> int:
        return self._daemon.pid

    def uri(self, database: str, user: str = "postgres", port: int | None = None) -> str:
        return f"postgresql://{user}@127.0.0.1:{port or self.port}/{database}"

    def connect(self, database: str, *, autocommit: bool = True) -> psycopg.Connection[Any]:
        return psycopg.connect(self.uri(database), autocommit=autocommit, prepare_threshold=None, connect_timeout=10)

    def _prepare(self) -> None:
        with self.connect("postgres") as admin:
            for role in ROLES:
                admin.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
            admin.execute("CREATE ROLE locked LOGIN PASSWORD 'open sesame'")
            admin.execute("CREATE DATABASE outbox_template")
            admin.execute("CREATE DATABASE empty_template")
        with self.connect("outbox_template") as template:
            runner.migrate(template, SCHEMA)

    def create(self, template: str) -> str:
        name = f"test_{uuid4().hex[:12]}"
        # Copied through the log, which 15 and later do unless told, it costs twice the time.
        copied = sql.SQL("" if self.version == "14" else "STRATEGY FILE_COPY")
        made = sql.SQL("CREATE DATABASE {} TEMPLATE {} {}")
        with self.connect("postgres") as admin:
            admin.execute(made.format(sql.Identifier(name), sql.Identifier(template), copied))
        return name

    def drop(self, name: str) -> None:
        with self.connect("postgres") as admin:
            for (gid,) in admin.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", (name,)).fetchall():
                with self.connect(name) as inside:
                    inside.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
            admin.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))

    def stop(self) -> None:
        self._daemon.stop()


class Pooled(Protocol):
    """A server that a pool can be put before."""

    @property
    def port(self) -> int: ...

    def uri(self, database: str, *, port: int | None = None) -> str: ...


class PgBouncer:
    """Debian's PgBouncer in transaction mode before one server."""

    def __init__(self, server: Pooled) -> None:
        port = free_port()
        directory = _own_directory("outbox-pgbouncer-")
        users = directory / "users.txt"
        users.write_text("".join(f'"{role}" ""\n' for role in ("postgres", *ROLES)))
        self._configuration = directory / "pgbouncer.ini"
        self._settings = (
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = transaction\n"
            "default_pool_size = 10\nmax_client_conn = 200\nserver_login_retry = 1\n"
        )
        self._configure(server.port)
        self._daemon = Daemon("PgBouncer", port, directory, ["/usr/sbin/pgbouncer", str(self._configuration)])
        self._daemon.wait_ready(lambda: psycopg.connect(server.uri("postgres", port=port)).close())

    def lead_to(self, port: int) -> None:
        """Lead to another server from now on; clients keep their connections."""
        self._configure(port)
        self._daemon._process.send_signal(signal.SIGHUP)

    def _configure(self, port: int) -> None:
        self._configuration.write_text(f"[databases]\n* = host=127.0.0.1 port={port}\n{self._settings}")

    @property
    def port(self) -> int:
        return self._daemon.port

    def stop(self) -> None:
        self._daemon.stop()


@dataclass
class Database:
    """A database of one test. `connect` goes through the pool where the test asks for it, `direct` never does."""

    server: PostgresServer
    name: str
    port: int
    _open: list[psycopg.Connection[Any]] = field(default_factory=list)
    _directories: list[str] = field(default_factory=list)

    def uri(self, user: str = "postgres", *, port: int | None = None) -> str:
        return self.server.uri(self.name, user, port or self.port)

    def files(self, user: str = "postgres", *, port: int | None = None) -> ConnectionFiles:
        """The mounted Secret of this database."""
        directory = tempfile.mkdtemp(prefix="outbox-secret-")
        self._directories.append(directory)
        (Path(directory) / "uri").write_text(self.uri(user, port=port))
        return ConnectionFiles(Path(directory))

    def connect(
        self, user: str = "postgres", *, autocommit: bool = True, name: str = "test", port: int | None = None
    ) -> psycopg.Connection[Any]:
        """A connection as the product opens it, closed after the test. Unqualified names of ours fail on it."""
        connection = self.files(user, port=port).connect(name)
        connection.autocommit = autocommit
        self._open.append(connection)
        return connection

    def direct(self, user: str = "postgres", *, autocommit: bool = True) -> psycopg.Connection[Any]:
        """A plain connection past the pool: for strangers, and for looking."""
        return self.connect(user, autocommit=autocommit, name="stranger", port=self.server.port)

    def configure(self, name: str, value: str) -> None:
        """Set a parameter of the server for all sessions of this database that begin from now on."""
        with self.server.connect("postgres") as admin:
            names = sql.Identifier(self.name), sql.Identifier(name)
            admin.execute(sql.SQL("ALTER DATABASE {} SET {} = {}").format(*names, sql.Literal(value)))

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        for directory in self._directories:
            shutil.rmtree(directory)
        self._open.clear()
        self._directories.clear()

    def empty(self) -> None:
        """Forget what a test left: far cheaper than a new database."""
        with self.server.connect(self.name) as connection:
            connection.execute(_EMPTY)


_EMPTY = """
DO $$ DECLARE t record; BEGIN
    PERFORM set_config('session_replication_role', 'replica', true);  -- no trigger keeps what a swap left
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND state LIKE 'idle in transaction%' AND pid <> pg_backend_pid();
    FOR t IN SELECT c.relname, c.relkind FROM pg_class c
             WHERE c.relnamespace = 'outbox'::regnamespace
               AND (c.relkind = 'r' AND c.relname NOT IN ('applied_migrations', 'database_identity')
                    OR c.relname LIKE 'unowned_calls%')
    LOOP
        IF t.relkind = 'r' THEN EXECUTE format('DELETE FROM outbox.%I', t.relname);
        ELSE EXECUTE format('DROP SEQUENCE outbox.%I', t.relname); END IF;
    END LOOP;
END $$
"""


class Servers:
    """Starts what is asked for, once; directories are made in `parent`."""

    def __init__(self, settings: dict[str, str] | None = None, parent: Path = _DISK) -> None:
        self._settings = settings
        self._parent = parent
        self._shared: dict[str, Database] = {}
        self._servers: dict[str, PostgresServer] = {}
        self._pool: PgBouncer | None = None
        self._closing = contextlib.ExitStack()

    def get(self, version: str = DEFAULT_VERSION) -> PostgresServer:
        if version not in self._servers:
            self._servers[version] = PostgresServer(version, self._settings, self._parent)
        return self._servers[version]

    def pool(self) -> PgBouncer:
        if self._pool is None:
            self._pool = PgBouncer(self.get())
        return self._pool

    @contextlib.contextmanager
    def database(self, kind: str = DEFAULT_VERSION, template: str = "outbox_template") -> Iterator[Database]:
        """A fresh database of a version, or behind PgBouncer."""
        server = self.get(DEFAULT_VERSION if kind == POOLED else kind)
        port = self.pool().port if kind == POOLED else server.port
        database = Database(server, server.create(template), port)
        if template == "outbox_template":
            with server.connect(database.name) as connection:  # a copy of the template, not of an outbox
                connection.execute(
                    "UPDATE outbox.database_identity SET database_oid = (SELECT oid FROM pg_database "
                    "WHERE datname = current_database()), database_uuid = gen_random_uuid()"
                )
        try:
            yield database
        finally:
            database.close()
            server.drop(database.name)

    @contextlib.contextmanager
    def shared(self, kind: str) -> Iterator[Database]:
        """One migrated database for many tests, emptied before each; only for tests that leave the schema as it is."""
        if kind not in self._shared:
            self._shared[kind] = self._closing.enter_context(self.database(kind))
        database = self._shared[kind]
        database.empty()
        try:
            yield database
        finally:
            database.close()

    def stop(self) -> None:
        self._closing.close()
        if self._pool is not None:
            self._pool.stop()
        for server in self._servers.values():
            server.stop()


def build_source(**fields: object) -> Source:
    """A source as a resource names it, with defaults for what the test does not care about."""
    named = {"connection": {"secretRef": {"name": "db"}}, "cursor": "TransactionOrder"}
    return Source.model_validate(named | fields)
