"""A processor's Spark side as the worker's loop sees it: a target whose batches come from Spark.

`open` starts a query under an epoch, `next_batch` waits for what it prepared, `handle` runs the prepared effects in
the loop's transaction, `accept` lets Spark go on. Everything about ownership, codes, retries and status is the
loop's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import PermanentError, TransientError
from outbox_core.ports import InTransaction
from outbox_core.processor.outcomes import Rejected
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from outbox_core.report import Reason
from outbox_spark.application import UserApplication, load_application
from outbox_spark.failure import explain_failure
from outbox_spark.session import SessionStarter, count_executors, is_alive, runs_on_kubernetes
from outbox_spark.stream import Stream, find_stateful
from outbox_spark.streaming.directory import QueryDirectories, QueryDirectory
from outbox_spark.streaming.lineage import fetch_history, store_begin
from outbox_spark.streaming.query import PreparedBatch, QueryRun
from outbox_spark.streaming.resume import Resume, decide_resume
from outbox_spark.writing.files import FileArea
from outbox_spark.writing.staging import StagingArea
from outbox_worker.handlers.handler import Signature, read_signature
from outbox_worker.logs import get_logger
from outbox_worker.postgres.connection import Connection, ConnectionFiles
from outbox_worker.postgres.ownership.partitions import is_settled
from outbox_worker.targets.sql import SqlSink

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.postgres.transactions.transaction import Transaction

_log = get_logger("outbox.spark")
_FIRST_SECONDS: Final = 120.0
"""More than `delivery.timeout` for this process's first batch: executors' images are pulled, their Python is started
and the plan is compiled in it."""


class SparkPipeline(InTransaction):
    """The target of a Spark processor."""

    needs_payload = False

    def __init__(
        self, config: ProcessorConfig, key: ProcessorKey, *, source: Path, handler: Path, sessions: SessionStarter
    ) -> None:
        """Start nothing; `source` has connection files, `handler` is where the ConfigMap is mounted."""
        self._config = config
        self._key = key
        self._files = ConnectionFiles(source, config.source.connection.secret_ref.name)
        self._handler = handler
        self._sessions = sessions
        self._stream = Stream(config, source, UserApplication())
        self._seen: Signature = ()
        self._run: QueryRun | None = None
        self._prepared: PreparedBatch | None = None
        self._has_prepared = False
        self.epoch: int | None = None

    @override
    def check(self) -> None:
        """Look at application and statement, and begin to start Spark; a query of an earlier lease is ended.

        Raises:
            OutboxError: the application cannot be used.

        """
        self.stop()
        if self._config.target is not None and self._config.target.sql is not None:
            SqlSink(self._config.target.sql).check()
        self._load_application()
        self._sessions.begin()

    def is_started(self, wait: float) -> bool:
        """Say whether Spark is there; wait so many seconds for it at most. Executors come by themselves.

        Raises:
            TransientError: it cannot be started.

        """
        if not self._sessions.is_settled(wait):
            return False
        self._sessions.get()
        return True

    @override
    def changed(self) -> bool:
        return read_signature(self._handler) != self._seen

    @override
    def close(self) -> None:
        """End query, session and executors."""
        self.stop()
        session = self._sessions.session
        if session is not None:
            try:
                session.stop()
            except Exception as error:  # noqa: BLE001 - the process ends
                _log.warning("the session did not stop cleanly", extra={"error": str(error)[:400]})

    def stop(self) -> None:
        """End the query; what is not committed is rolled back."""
        run, self._run, self._prepared, self.epoch = self._run, None, None, None
        if run is not None:
            run.stop()

    def stop_admitting(self) -> bool:
        """Let no further batch begin; say whether one is in hand."""
        if self._run is None:
            return False
        self._run.handover.stop_admitting()
        return self._run.handover.in_hand()

    def open(self, connection: Connection, epoch: int, stored: Checkpoint) -> Rejected | None:
        """Start the query under a lease, from the stored checkpoint; or say why that needs a person's decision.

        First what earlier owners left: committed files are moved into place, staging tables dropped.

        Raises:
            OutboxError: it cannot be started; the message says what to do.

        """
        self.stop()
        self._load_application()
        session, stream = self._sessions.get(), self._stream
        files = FileArea(self._files, self._key.schema, self._key.processor_id, epoch)
        staging = StagingArea(self._files, self._key.schema, self._key.processor_id, epoch)
        moved, dropped = files.roll_forward(), staging.sweep()
        try:
            stateful = frozenset[str]()
            if stream.application.transform is not None:  # messages alone have no state, and a look costs seconds
                stateful = find_stateful(stream.build(session, stored, stored))
            self._refuse_unshared_state(stateful)
            directory = self._directory(connection, stored, stateful=bool(stateful))
            if isinstance(directory, Rejected):
                return directory
            rows = stream.build(session, directory.start, BEGINNING if stateful else stored)
            run = QueryRun(directory, stored, bool(stateful), staging, files, stream)
            run.start(rows, stream.output_mode(stateful))
            self._run = run
        except Exception as error:
            self._check_alive()
            raise explain_failure(error, stream.code) from error
        self.epoch = epoch
        _log.info(
            "query started",
            extra={
                "epoch": epoch, "checkpoint": str(stored), "directory": str(directory.path),
                "stateful": sorted(stateful), "filesRolledForward": moved, "stagingTablesDropped": dropped,
            },
        )  # fmt: skip
        return None

    def next_batch(self, *, wait: float, timeout: float) -> PreparedBatch | None:
        """Wait for a prepared batch; where preparing failed the query is ended, and has to be opened again.

        Raises:
            OutboxError: preparing failed; open again.

        """
        if self._run is None:
            return None
        try:
            allowed = timeout if self._has_prepared else timeout + _FIRST_SECONDS
            self._prepared = self._run.next_batch(wait=wait, timeout=allowed)
            self._has_prepared = self._has_prepared or self._prepared is not None
        except Exception as error:
            self.stop()
            self._check_alive()
            explained = explain_failure(error, self._stream.code)
            if explained.reason is Reason.HANDLER_TIMEOUT and self.executors() == 0:
                explained = TransientError(
                    "no executor came to prepare the batch: look at the executors' pods, and at what the driver's log "
                    "says of the API server",
                    reason=Reason.TARGET_UNAVAILABLE,
                )
            raise explained from error
        return self._prepared

    def is_behind_plan(self, stored: Checkpoint) -> bool:
        """Say whether Spark has planned a batch beyond the checkpoint: it is being prepared, or failed and is again.

        Raises:
            OutboxError: the query checkpoint directory cannot be read.

        """
        return self._run is not None and self._run.directory.find_planned() > stored

    @override
    def handle(self, transaction: Transaction, batch: Batch) -> int:
        """Run the prepared effects in the checkpoint's transaction.

        Raises:
            OutboxError: a statement failed, or the batch is not the one prepared.

        """
        prepared = self._prepared
        if prepared is None or prepared.effects is None or prepared.whole.end != batch.examined:
            raise TransientError(f"no batch up to {batch.examined} is prepared", reason=Reason.INTERNAL_ERROR)
        if not prepared.effects.are_there(transaction.connection):
            self.epoch = None  # the next look begins the query anew, from the stored checkpoint
            raise TransientError(
                "rows that were staged are gone (PostgreSQL was restarted): the batch is prepared again",
                reason=Reason.DATABASE_UNAVAILABLE,
            )
        prepared.effects.apply(transaction, batch)
        return prepared.count

    def accept(self, stored: Checkpoint) -> None:
        """Everything up to `stored` is committed, or was answered 0: Spark goes on."""
        self._prepared = None
        if self._run is not None:
            self._run.handover.accept(stored)

    def executors(self) -> int | None:
        """Count live executors; None before there is a session, or where they are threads of the driver."""
        session = self._sessions.session
        if session is None:
            return None
        try:
            return count_executors(session)
        except Exception:
            self._check_alive()
            raise

    def _check_alive(self) -> None:
        """End the process when its JVM is gone: it cannot get another; a restarted process can."""
        session = self._sessions.session
        if session is not None and not is_alive(session):
            raise SystemExit("the driver's JVM is gone")

    def _load_application(self) -> None:
        self._seen = read_signature(self._handler)
        self._stream = replace(self._stream, application=load_application(self._config, self._handler))

    def _directory(self, connection: Connection, stored: Checkpoint, *, stateful: bool) -> QueryDirectory | Rejected:
        """Find or begin the query checkpoint directory that goes with the stored checkpoint."""
        directories = QueryDirectories(Path(self._config.plan.query_checkpoint_path), self._key.processor_id)
        current = directories.current()
        view = None if current is None else current.view()
        now, untouched = fetch_history(connection, self._config.source, self._key, stored)
        settled = view is None or is_settled(connection, view.planned)
        decision = decide_resume(view, stored, now=now, stateful=stateful, untouched=untouched, settled=settled)
        _log.info("query checkpoint directory", extra={"decision": decision.action.value, "why": decision.message})
        if decision.action is Resume.CONTINUE and current is not None:
            return current
        if decision.action is Resume.BEGIN:
            store_begin(connection, self._key, now, stored)
            return directories.begin(now, stored)
        if decision.action is Resume.REFUSE_AHEAD and view is not None:
            return Rejected(StoreAnswer.OLDER, view.committed, max(view.planned, view.committed), stored)
        kind = TransientError if decision.action is Resume.WAIT else PermanentError
        raise kind(decision.message, reason=Reason.QUERY_STATE_MISMATCH)

    def _refuse_unshared_state(self, stateful: frozenset[str]) -> None:
        """Executor pods write the state, the driver's pod reads it: both need the directory."""
        plan = self._config.plan
        if stateful and runs_on_kubernetes(plan.config) and not plan.shares(plan.query_checkpoint_path):
            raise PermanentError(
                f"transform keeps state ({', '.join(sorted(stateful))}), and spark.queryCheckpointPath "
                f"{plan.query_checkpoint_path} lies on no volume that driver and executors share: add a "
                "PersistentVolumeClaim to spark.volumes whose mountPath holds that path, or keep the state in tables "
                "with handle(messages, effects)",
                reason=Reason.INVALID_CONFIGURATION,
            )
