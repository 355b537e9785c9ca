"""PostgreSQL's feeds of mode Ordered, as `outbox_worker.wiring` puts them together, on a bench."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from typing_extensions import override

from outbox_core.config import ProcessorConfig
from outbox_core.ports import InTransaction
from outbox_core.processor.outcomes import HeldLease
from outbox_core.processor.state import lease_of
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_worker.databases import Databases
from outbox_worker.engine.owner_steps import WholeProcessor
from outbox_worker.engine.steps import StepContext
from outbox_worker.engine.throttle import Throttle
from outbox_worker.feeds.cursor import CheckpointSettling, CursorFeed
from outbox_worker.feeds.held import HeldFeed
from outbox_worker.feeds.partition_reader import PartitionReader
from outbox_worker.postgres import identity
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases
from outbox_worker.postgres.transactions.transaction import TransactionRunner
from outbox_worker.session import Session
from tests.support.database import contract
from tests.support.feeds.bench import LIMIT, Owner, handle_with, loaded
from tests.support.worker import SQL_TARGET, build_config

if TYPE_CHECKING:
    import psycopg

    from outbox_core.message import Batch
    from outbox_core.processor.failing import Failure
    from outbox_core.processor.outcomes import StepOutcome
    from tests.support.servers.postgres import Database

KEY = ProcessorKey("outbox", "orders")


class _Effects(InTransaction):
    """A target that needs messages; the bench makes the effects itself."""

    needs_payload = True

    @override
    def check(self) -> None:
        return

    @override
    def handle(self, transaction: Any, batch: Batch) -> int:
        raise AssertionError("the bench makes the effects")


class PostgresProducer:
    """One transaction of an application."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    def insert(self, *names: str, key: str | None = None) -> None:
        for name in names:
            self._connection.execute(
                "INSERT INTO outbox.messages (message_id, message_type, partition_key, data) "
                "VALUES (%s, 't', %s, '{}')",
                (name, key),
            )

    def commit(self) -> None:
        self._connection.commit()

    def roll_back(self) -> None:
        self._connection.rollback()


class PostgresBench:
    """The bench on a database; `close` ends its sessions."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._looking = database.direct()
        self._looking.execute("CREATE TABLE IF NOT EXISTS public.effects (n serial, message_id text)")
        self._looking.execute("TRUNCATE public.effects")
        self._config = ProcessorConfig.model_validate(
            build_config(database, SQL_TARGET, delivery={"batchSize": LIMIT, "leaseDuration": "60s"})
        )
        assert leases.claim(self._looking, KEY, self._config.resource).granted
        self._sessions: dict[int, Session] = {}
        self._runners: dict[int, TransactionRunner] = {}

    def close(self) -> None:
        for session in self._sessions.values():
            session.discard()

    def begin(self) -> PostgresProducer:
        return PostgresProducer(self._database.direct(autocommit=False))

    def own(self, *, loads: bool = True) -> Owner:
        self.end_lease()
        session = Session(self._database.files(), "test")
        config, connection = self._config, session.connection()
        token, lease = uuid4(), config.delivery.lease_duration
        answer = leases.acquire_lease(
            connection, KEY, claim_uid=config.resource.uid, pod="pod", token=token, lease=lease
        )
        assert answer.acquired
        assert answer.epoch is not None
        nothing = cast("Any", None)  # what no feed uses
        context = StepContext(
            config, KEY, "pod", token, Databases(config, session, session), nothing, nothing, nothing, nothing,
            _Effects(), Throttle(config.delivery),
        )  # fmt: skip
        runner, reader = TransactionRunner(KEY, lease=lease.total_seconds(), timeout=60.0), PartitionReader(context)
        runner.server_run = identity.fetch_run(connection, KEY.schema)
        owner = Owner(
            loaded(HeldLease(0, answer.epoch, token), BEGINNING), CursorFeed(context, reader, runner),
            CheckpointSettling(context, reader, runner), HeldFeed(context), WholeProcessor(context),
        )  # fmt: skip
        self._sessions[answer.epoch], self._runners[answer.epoch] = session, runner
        if loads:
            pair = self.load(owner)
            assert pair is not None
            owner.go_on(pair)
        return owner

    def end_lease(self) -> None:
        self._looking.execute("UPDATE outbox.processor_leases SET expires_at = clock_timestamp()")

    def load(self, owner: Owner) -> Checkpoint | None:
        lease = lease_of(owner.state)
        connection = self._sessions[lease.epoch].connection()
        owner.unit.before_load(connection)
        with connection.transaction():
            start = owner.unit.load(connection, lease)
        return None if start is None else start.pair

    def handle(self, owner: Owner, batch: Batch, failed: tuple[Failure, ...] = ()) -> StepOutcome:
        epoch = lease_of(owner.state).epoch
        run = partial(self._runners[epoch].run, self._sessions[epoch].connection())
        return handle_with(run, owner, batch, failed, _write)

    def overwrite(self, pair: Checkpoint | None) -> None:
        contract.put(self._looking, None if pair is None else (pair.transaction_id, pair.position))

    def stored(self) -> Checkpoint | None:
        pair = contract.stored(self._looking)
        return None if pair is None else Checkpoint(*pair)

    def effects(self) -> list[str]:
        rows = self._looking.execute("SELECT message_id FROM public.effects ORDER BY n").fetchall()
        return [row[0] for row in rows]


def _write(connection: psycopg.Connection[Any], name: str) -> None:
    connection.execute("INSERT INTO public.effects (message_id) VALUES (%s)", (name,))
