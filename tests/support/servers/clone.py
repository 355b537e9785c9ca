"""Whole servers that come from others: base backups, standbys that are promoted, upgrades. Of PostgreSQL 15."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import psycopg

from tests.support.servers import postgres
from tests.support.servers.postgres import Daemon, PostgresServer, binaries, free_port, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VERSION = "15"
_RESETWAL = """#!/bin/sh -e
# pg_upgrade only asks what it would do: pg_resetwal -n "DIRECTORY"
[ "$1" = -n ] || exec {program} "$@"
look=$(mktemp -d)
trap 'rm -rf "$look"' EXIT
mkdir "$look/global" "$look/pg_wal"
cp "$2/global/pg_control" "$look/global/"
echo {version} >"$look/PG_VERSION"
{program} -n "$look"
"""


def run_as_server(command: list[str], directory: Path) -> None:
    """Run a program of PostgreSQL as the user that servers run as; show what it said when it fails."""
    done = subprocess.run(postgres._as_server_user(command), check=False, capture_output=True, text=True, cwd=directory)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


class Clone:
    """A server over a data directory that something else made."""

    def __init__(self, directory: Path, version: str = VERSION) -> None:
        settings = [f"--{name}={value}" for name, value in postgres._SETTINGS.items()]
        port = free_port()
        programs = binaries(version)
        self.directory = directory
        self._daemon = Daemon(
            f"a clone of PostgreSQL {version}",
            port,
            directory,
            [
                str(programs / "postgres"),
                "-D",
                str(directory / "data"),
                "-p",
                str(port),
                "-k",
                str(directory),
                *settings,
            ],
        )
        self._daemon.wait_ready(lambda: self.connect("postgres").close())

    @property
    def port(self) -> int:
        return self._daemon.port

    def uri(self, database: str, user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def connect(self, database: str) -> psycopg.Connection[Any]:
        return psycopg.connect(self.uri(database), autocommit=True, prepare_threshold=None, connect_timeout=10)

    def promote(self) -> None:
        with self.connect("postgres") as admin:
            assert admin.execute("SELECT pg_promote(wait => true, wait_seconds => 60)").fetchone() == (True,)

    def stop(self) -> None:
        self._daemon.stop()


class Primary(PostgresServer):
    """A server of its own that others may copy."""

    def __init__(self, version: str = VERSION) -> None:
        super().__init__(version)
        self.directory = self._daemon.directory
        with (self.directory / "data" / "pg_hba.conf").open("a") as hba:
            hba.write("host replication all 127.0.0.1/32 trust\nlocal all all trust\n")
        with self.connect("postgres") as admin:
            admin.execute("SELECT pg_reload_conf()")

    def kill(self) -> None:
        """End it at once, as a lost machine."""
        self._daemon._process.send_signal(signal.SIGQUIT)
        self._daemon._process.wait(30)

    def start(self) -> None:
        """Run it again over the same files, as after a crash."""
        self._daemon.start()
        self._daemon.wait_ready(lambda: self.connect("postgres").close())

    @contextlib.contextmanager
    def copied(self, *, standby: bool) -> Iterator[Clone]:
        """A base backup, opened by itself or following this server."""
        directory = postgres._own_directory("outbox-clone-", postgres.find_memory())
        command = [
            str(binaries(VERSION) / "pg_basebackup"), "-D", str(directory / "data"), "-h", "127.0.0.1", "-p",
            str(self.port), "-U", "postgres", "-X", "stream", "-c", "fast", "--no-sync", *(["-R"] if standby else []),
        ]  # fmt: skip
        clone = None
        try:
            run_as_server(command, directory)
            clone = Clone(directory)
            yield clone
        finally:
            if clone is not None:
                clone.stop()
            shutil.rmtree(directory, ignore_errors=True)

    def wait_received(self, clone: Clone) -> None:
        """Wait until a standby has replayed all that is committed here, which nothing waits for to be flushed."""
        with self.connect("postgres") as here, clone.connect("postgres") as there:
            here.execute("CHECKPOINT")
            (end,) = here.execute("SELECT pg_current_wal_flush_lsn()").fetchone() or (None,)
            wait_until(
                lambda: there.execute("SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn", (end,)).fetchone() == (True,),
                "the standby has replayed everything",
            )

    @contextlib.contextmanager
    def upgraded(self) -> Iterator[Clone]:
        """Stop, and go on as a server of version 15 by pg_upgrade.

        pg_upgrade also asks for the old version's pg_controldata and pg_resetwal, which are not there. Those of 15 read
        the same control file; the latter only where it does not see that the directory is of 14.
        """
        old = postgres._own_directory("outbox-programs-")
        new = postgres._own_directory("outbox-upgraded-", postgres.find_memory())
        clone = None
        try:
            (old / "pg_controldata").symlink_to(binaries(VERSION) / "pg_controldata")
            (old / "pg_resetwal").write_text(
                _RESETWAL.format(program=binaries(VERSION) / "pg_resetwal", version=VERSION)
            )
            (old / "pg_resetwal").chmod(0o755)
            for name in ("postgres", "pg_ctl"):
                (old / name).symlink_to(binaries(self.version) / name)
            programs = binaries(VERSION)
            run_as_server(
                [str(programs / "initdb"), "-D", str(new / "data"), "-U", "postgres", "-A", "trust", "-E", "UTF8",
                 "--locale=C", "-N"], new,
            )  # fmt: skip
            self._daemon._process.send_signal(signal.SIGINT)
            self._daemon._process.wait(30)
            run_as_server(
                [str(programs / "pg_upgrade"), "-b", str(old), "-B", str(programs), "-d", str(self.directory / "data"),
                 "-D", str(new / "data"), "-U", "postgres", "-p", str(free_port()), "-P", str(free_port()),
                 "-s", "/tmp", "-O", "-c max_prepared_transactions=20"], new,
            )  # fmt: skip
            clone = Clone(new)
            yield clone
        finally:
            if clone is not None:
                clone.stop()
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(new, ignore_errors=True)
