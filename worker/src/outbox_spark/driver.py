"""The driver of a Spark processor: the worker's loop, with batches that Spark prepares.

Claim, lease, heartbeat, conflicts, retries, status, signals are `outbox_worker`'s own code. What differs is the feed:
FETCH waits for Spark. The database is the authority, so HANDLE stores the checkpoint under the epoch in the
transaction of the effects, as for any worker, and only then Spark is let go on.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.message import Batch
from outbox_core.ports import Feed, Target
from outbox_core.processor import outcomes
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.report import Reason
from outbox_core.spec import Guarantee
from outbox_spark.session import SessionStarter, build_configuration, start_session
from outbox_spark.streaming.pipeline import SparkPipeline
from outbox_worker.main import Engine
from outbox_worker.main import main as run_worker
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import conflicts
from outbox_worker.postgres.transactions.transaction import StoreRequest
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_core.config import ProcessorConfig
    from outbox_core.processor.state import ProcessorState
    from outbox_spark.streaming.query import PreparedBatch
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.settings import Settings
    from outbox_worker.wiring import Unit

_LOOK_SECONDS: Final = 0.2
"""How often a wait for Spark looks whether it is still wanted."""
_FETCH_SECONDS: Final = 1.0
"""How long one FETCH waits; between two, ownership and signals are looked at."""
_EXECUTORS_SECONDS: Final = 2.0
_SESSION_SECONDS: Final = 120.0
"""Below what the liveness probe allows the loop for one step."""


class SparkFeed(Feed):
    """Batches that Spark prepares."""

    def __init__(self, unit: Unit) -> None:
        self._context = unit.context
        if not isinstance(unit.context.target, SparkPipeline):
            raise ConfigurationError("engine Spark needs the Spark pipeline as target")
        self._pipeline = unit.context.target
        self._runner = unit.runner
        self._timeout = unit.context.config.delivery.timeout.total_seconds()
        self._counted = 0.0

    @override
    def note_crash(self) -> None:
        """Stop the query; `fetch` opens it again, or finds that Spark is ahead."""
        self._pipeline.stop()

    @override
    def await_ready(self) -> None:
        """Wait for Spark: how long a session takes to start is no matter of delivery.timeout."""
        until = time.monotonic() + _SESSION_SECONDS
        while not self._pipeline.is_started(_LOOK_SECONDS):
            if self._context.shutdown.requested:
                raise TransientError("asked to stop while Spark was starting", reason=Reason.DRAINING)
            if time.monotonic() > until:
                raise TransientError(
                    "the Spark session is still starting: look at the driver's log and at the executors' pods",
                    reason=Reason.TARGET_UNAVAILABLE,
                )

    @override
    def note_stored(self, stored: Checkpoint) -> None:
        """Tell Spark; else it would run the batch again, and be told 0 although nothing is wrong."""
        self._pipeline.accept(stored)

    @override
    def fetch(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Wait for a batch of Spark's; begin the query if this lease has none."""
        if state.lease is None or state.stored is None:
            raise TransientError("no checkpoint is loaded", reason=Reason.INTERNAL_ERROR)
        if self._pipeline.epoch != state.lease.epoch or self._pipeline.changed():
            refused = self._pipeline.open(self._connection, state.lease.epoch, state.stored)
            if refused is not None:
                return refused
        self._count_executors()
        prepared = self._wait_for_batch(state)
        if prepared is None and self._pipeline.is_behind_plan(state.stored):
            # Neither idle nor well: how often it failed counts on until it is stored.
            return outcomes.Throttled(0.0, Reason.RUNNING, "")
        if prepared is None:
            self._runner.look_at_run(self._connection)
            return outcomes.Fetched(Batch(state.stored, state.stored, (), 0, full=True, matched_count=0))
        if prepared.effects is None:
            return self._answer_replay(state.lease, state.stored, prepared)
        if prepared.whole.start != state.stored:
            self._pipeline.stop()
            raise TransientError(
                f"Spark prepared {prepared.whole}, the stored checkpoint is {state.stored}",
                reason=Reason.INTERNAL_ERROR,
            )
        # Always a match: a range without messages is stored at once too, or Spark would be ahead of the checkpoint.
        batch = Batch(
            state.stored, prepared.whole.end, (), prepared.count, full=True, matched_count=max(prepared.count, 1)
        )
        # Once the worker is to stop, the loop would end before the batch is handled.
        return outcomes.Fetched(batch, is_last=self._context.shutdown.requested)

    @property
    def _connection(self) -> Connection:
        return self._context.databases.target.connection()

    def _wait_for_batch(self, state: ProcessorState) -> PreparedBatch | None:
        """Wait a while; once asked to stop, for the batch in hand as long as the grace period lasts."""
        try:
            return self._context.shutdown.limited(2 * self._timeout, self._look_for_batch)
        except Interrupted as error:
            self._pipeline.stop()
            raise error.as_error(f"the batch after {state.stored}") from error

    def _look_for_batch(self) -> PreparedBatch | None:
        until = time.monotonic() + _FETCH_SECONDS
        while True:
            prepared = self._pipeline.next_batch(wait=_LOOK_SECONDS, timeout=self._timeout)
            stopping = self._context.shutdown.requested
            if prepared is not None or (stopping and not self._pipeline.stop_admitting()):
                return prepared
            if not stopping and (time.monotonic() > until or self._context.ownership.losses.lease):
                return None

    def _answer_replay(
        self, lease: outcomes.HeldLease, stored: Checkpoint, prepared: PreparedBatch
    ) -> outcomes.StepOutcome:
        """Ask the contract about a range that Spark runs again although it is stored; its 0 is put on record."""
        connection, (start, end) = self._connection, (prepared.whole.start, prepared.whole.end)
        answer = self._runner.ask(connection, StoreRequest(lease, start, max(end, stored)))
        if answer is StoreAnswer.IGNORED:
            refusal = conflicts.Refusal(
                code=answer, expected=start, stored=stored, new=end, epoch=lease.epoch, pod=self._context.pod,
                claim_uid=self._context.config.resource.uid, needs_person=False,
            )  # fmt: skip
            conflicts.record_refusal(connection, self._context.key, refusal)
            self._pipeline.accept(end)
        return outcomes.Rejected(answer, start, stored, stored)

    def _count_executors(self) -> None:
        now = time.monotonic()
        if now - self._counted > _EXECUTORS_SECONDS:
            self._counted = now
            self._context.status.executors = self._pipeline.executors()


def build_pipeline(config: ProcessorConfig, settings: Settings) -> Target:
    """Build the pipeline that the resource names.

    Raises:
        ConfigurationError: a guarantee that Spark's effects do not have.

    """
    if config.guarantee is not Guarantee.TRANSACTIONAL:
        raise ConfigurationError("engine Spark is Transactional: leave delivery.guarantee out")
    configuration = build_configuration(config, os.environ, uuid.uuid4().hex[:6])
    return SparkPipeline(
        config,
        ProcessorKey(config.source.schema_name, config.processor_id),
        source=settings.source,
        handler=settings.handler,
        sessions=SessionStarter(lambda: start_session(configuration)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a Spark processor's driver; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    return run_worker(given, Engine(build_pipeline, SparkFeed))
