"""`outbox` as a person runs it: a real process, its output, its exit status; and processors in every state."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import uuid
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outbox_cli.main import main
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer, parse_checkpoint
from outbox_core.report import ResourceRef
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints, conflicts

if TYPE_CHECKING:
    import psycopg

    from tests.support.servers.postgres import Database

PROGRAM = Path(sys.executable).with_name("outbox")
SCHEMA = "outbox"


@dataclass(frozen=True)
class Done:
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


@dataclass
class Cli:
    """Runs `outbox` against one database: in this process where only its words and its exit status matter."""

    directory: Path

    @property
    def where(self) -> tuple[str, str]:
        return "--connection", str(self.directory)

    def run(self, *arguments: str) -> Done:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main([*arguments, *self.where])
            except SystemExit as ended:  # argparse
                status = int(ended.code or 0)
        return Done(status, out.getvalue(), err.getvalue())

    def process(self, *arguments: str, where: tuple[str, ...] | None = None, **variables: str) -> Done:
        """Run the installed program."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        done = subprocess.run(
            [str(PROGRAM), *arguments, *(self.where if where is None else where)],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=clean | variables,
            stdin=subprocess.DEVNULL,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def json(self, *arguments: str, status: int = 0) -> Any:
        done = self.run(*arguments, "--output", "json")
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout)

    def at_a_terminal(self, *arguments: str, answer: str) -> tuple[int, str, str]:
        """Run with a terminal on stdin and stderr; return exit status, stdout, what the terminal showed."""
        outer, inner = pty.openpty()
        try:
            process = subprocess.Popen(
                [str(PROGRAM), *arguments, *self.where],
                stdin=inner,
                stdout=subprocess.PIPE,
                stderr=inner,
                text=True,
            )
            os.close(inner)
            os.write(outer, f"{answer}\n".encode())
            said, _ = process.communicate(timeout=60)
            return process.returncode, said, drain(outer)
        finally:
            os.close(outer)


def drain(terminal: int) -> str:
    """What a terminal showed, once its process ended."""
    shown = b""
    try:
        while part := os.read(terminal, 65_536):
            shown += part
    except OSError:  # the other side is closed: all is read
        pass
    return shown.decode()


@pytest.fixture
def cli(database: Database) -> Cli:
    """`outbox` against a migrated database, as its owner."""
    return Cli(database.files().directory)


@dataclass
class Shop:
    """One processor's surroundings: messages, claim, lease, checkpoint, conflicts, all by the product's own calls."""

    database: Database
    connection: psycopg.Connection[Any]
    key: ProcessorKey
    resource: ResourceRef

    def produce(self, count: int, message_type: str = "OrderPlaced") -> list[Checkpoint]:
        """Store messages, each in a transaction of its own; return their pairs."""
        found = []
        for number in range(count):
            row = self.connection.execute(
                "INSERT INTO outbox.messages (message_type, data) VALUES (%s, jsonb_build_object('n', %s::int)) "
                "RETURNING transaction_id::text, position",
                (message_type, number),
            ).fetchone()
            assert row is not None
            found.append(Checkpoint(int(row[0]), row[1]))
        return found

    def own(self, *, live: bool = False) -> tuple[int, uuid.UUID]:
        """Claim, and hold the lease for long or not at all."""
        assert ownership.claim(self.connection, self.key, self.resource).granted
        token = uuid.uuid4()
        lease = ownership.acquire_lease(
            self.connection, self.key, claim_uid=self.resource.uid, pod="pod-a", token=token,
            lease=timedelta(minutes=5),
        )  # fmt: skip
        assert lease.epoch is not None
        if not live:
            assert ownership.release_lease(self.connection, self.key, HeldLease(0, lease.epoch, token))
        return lease.epoch, token

    def store(self, pair: Checkpoint) -> None:
        """Store a checkpoint as the owner, then leave."""
        before = checkpoints.load(self.connection, self.key)
        epoch, token = self.own(live=True)
        answer = checkpoints.store(
            self.connection, self.key, HeldLease(0, epoch, token), new=pair, expected=before.pair if before else None
        )
        assert answer is StoreAnswer.STORED
        assert ownership.release_lease(self.connection, self.key, HeldLease(0, epoch, token))

    def stored(self) -> Checkpoint | None:
        found = checkpoints.load(self.connection, self.key)
        return None if found is None else found.pair

    def refuse(self, expected: Checkpoint, stored: Checkpoint | None, *, code: StoreAnswer = StoreAnswer.AHEAD) -> int:
        """Record what a worker was told: an open conflict."""
        told = conflicts.Refusal(code, expected, stored, expected, 1, "pod-a", self.resource.uid, needs_person=True)
        return conflicts.record_refusal(self.connection, self.key, told)

    def audit_log(self) -> list[tuple[Any, ...]]:
        return self.connection.execute(
            "SELECT action, from_transaction_id::text || ':' || from_position, "
            "to_transaction_id::text || ':' || to_position, reason, decided_by FROM outbox.audit_log ORDER BY id"
        ).fetchall()


@pytest.fixture
def shop(database: Database) -> Shop:
    """The processor `orders`, which has done nothing yet."""
    resource = ResourceRef(cluster="test", namespace="shop", name="orders", uid="uid-orders")
    return Shop(database, database.direct(), ProcessorKey(SCHEMA, "orders"), resource)


def pair(text: str) -> Checkpoint:
    return parse_checkpoint(text)
