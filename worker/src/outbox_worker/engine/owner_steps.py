"""The steps of every owner: prepare, claim, review, acquire, load, record what was refused, release.

They are the same in every mode; what a mode adds is said by its `OwnedUnit` and its `Supply`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.errors import ConfigurationError, OutboxError, TransientError
from outbox_core.plain import plain_count
from outbox_core.ports import OutsideTransaction, OwnedUnit, OwnerStart, Supply
from outbox_core.processor import outcomes
from outbox_core.processor.state import NEEDS_LEASE, lease_of
from outbox_core.progress.numbering import describe_mapping
from outbox_core.report import Reason
from outbox_core.spec import Mode
from outbox_worker.logs import get_logger
from outbox_worker.postgres import identity, remote_target
from outbox_worker.postgres.admin import mappings
from outbox_worker.postgres.feeds import competing, holding
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.progress import checkpoints, conflicts, rebuilds, starts
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.processor.state import ProcessorState, Step
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.feeds.partition_reader import PartitionReader
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.transactions.transaction import TransactionRunner

PrepareOutcome = outcomes.Prepared | outcomes.OwnershipLost
_log = get_logger("outbox.worker")
ECHO_SECONDS: Final = 0.5
"""For so long the failure of one partition to prepare is every partition's: they share the connection."""


class Preparation:
    """Connects and checks, for all partitions of a process; remembers a failure for a moment, if it is told to."""

    def __init__(self, echo_seconds: float = 0.0) -> None:
        self._echo_seconds = echo_seconds
        self._error: OutboxError | None = None
        self._until = 0.0

    def run(self, act: Callable[[], PrepareOutcome]) -> PrepareOutcome:
        """Do it, unless it failed a moment ago.

        Raises:
            OutboxError: it failed, now or then.

        """
        if self._error is not None and time.monotonic() < self._until:
            raise self._error
        try:
            outcome = act()
        except OutboxError as err:
            self._error, self._until = err, time.monotonic() + self._echo_seconds
            raise
        self._error = None
        return outcome


class StartingUnit(OwnedUnit):
    """A unit with a checkpoint: finds where one that has none starts."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._start: Checkpoint | None = None

    @override
    def before_load(self, connection: Connection) -> None:
        """Look before the transaction, which would be idle for as long as another database looks for the start."""
        self._start = None
        if self._context.config.has_remote_target and checkpoints.load(connection, self._context.key) is None:
            self._start = remote_target.read_durably(self._source, lambda: self.find_start(connection), lambda _: True)

    def find_start(self, connection: Connection) -> Checkpoint:
        """Compute where to start: read in the source's database, or copied from another processor."""
        config = self._context.config
        if self._start is not None:
            return self._start
        if config.start_from.processor_id is not None:
            return self.find_other(connection, config.start_from.processor_id).start
        return starts.compute_start(
            self._source, config.source, config.start_from, remote_target=self._context.config.has_remote_target
        )

    def find_other(self, connection: Connection, other_id: str) -> starts.OtherStart:
        """Find where another processor stands."""
        return starts.find_other(connection, self._source, self._context.config.source, self._context.key, other_id)

    @property
    def _source(self) -> Connection:
        return self._context.databases.source.connection()


class NothingPrepared(Supply):
    """For a mode whose batches need nothing before they are asked for."""


class WholeProcessor(StartingUnit):
    """A processor that is not partitioned: one checkpoint, one owner."""

    @override
    def is_stored(self, connection: Connection) -> bool:
        return checkpoints.load_untampered(connection, self._context.key) is not None

    @override
    def check_mode(self, connection: Connection) -> None:
        key = self._context.key
        count = partitions.fetch_count(connection, key)
        if count is not None:
            raise ConfigurationError(
                f"processor {key.processor_id!r} has {plain_count(count, 'partition')} here: "
                "one checkpoint means nothing to it. Set delivery.mode to Partitioned, or use another processorId",
                reason=Reason.PARTITIONS_DIFFER,
            )
        if self._context.config.delivery.mode is Mode.ORDERED and competing.is_begun(connection, key):
            raise ConfigurationError(
                f"processor {key.processor_id!r} hands out batches here: its checkpoint does not say which of them are "
                "done. Set delivery.mode to Competing, or use another processorId",
                reason=Reason.PARTITIONS_DIFFER,
            )

    @override
    def load(self, connection: Connection, lease: outcomes.HeldLease) -> checkpoints.Start | None:
        key = self._context.key
        self.check_mode(connection)
        start = checkpoints.ensure_start(
            connection, key, lease, self._context.config.source, lambda: self.find_start(connection)
        )
        # Again, after the checkpoint: another mode's first process stores its own and the checkpoint at once.
        self.check_mode(connection)
        return start


class OwnerSteps:
    """What an owner does before its first batch, and when it was refused."""

    def __init__(
        self,
        context: StepContext,
        runner: TransactionRunner,
        reader: PartitionReader,
        supply: Supply,
        unit: OwnedUnit,
        preparation: Preparation,
        *,
        take_over: bool,
    ) -> None:
        """Keep the collaborators; `take_over` forces the first claim."""
        self._context = context
        self._databases = context.databases
        self._runner = runner
        self._supply = supply
        self._unit = unit
        self._reader = reader
        self._preparation = preparation
        self._force = take_over
        self._timeline: int | None = None
        self._database = ""
        self._prepared = (0, 0)
        self._connections: tuple[Connection, ...] = ()
        self._lease = context.config.delivery.lease_duration
        self._timeout = context.config.delivery.timeout.total_seconds()
        self._outside = context.target if isinstance(context.target, OutsideTransaction) else None
        self._remembers = self._outside is not None and self._outside.has_own_transactions
        """The target has transactions of its own, in which it writes down what it delivered."""

    def is_unprepared(self, step: Step) -> bool:
        """Say whether a connection was opened since this partition prepared, by another one that shares it.

        It may lead to another server, and what was looked at on the one before means nothing there.
        """
        # A session opens another connection only where the one before is closed.
        if self._connections and not any(connection.closed for connection in self._connections):
            return False
        self._databases.target.connection()
        if step in NEEDS_LEASE:
            self._databases.source.connection()
        return self._databases.opened != self._prepared

    def prepare(self, state: ProcessorState) -> PrepareOutcome:
        """Connect; check schema and identity."""
        self._supply.check()
        return self._preparation.run(lambda: self._prepare(state))

    def _prepare(self, state: ProcessorState) -> PrepareOutcome:
        found = self._databases.prepare()
        self._database = found.uuid
        self._prepared = self._databases.opened
        self._connections = (self._connection(), self._databases.source.connection())
        self._context.observer.start(self._reader.messages)
        # Before anything is loaded: what is learned from here on is of this run, or is found not to be.
        run = identity.fetch_run(self._connection(), self._context.key.schema)
        known, self._runner.server_run = self._runner.server_run, run
        crashed = known not in (None, run)
        if crashed:
            self._reader.messages.forget()
        promoted = self._find_promotion(found.timeline)
        if promoted is not None and state.lease is not None:
            return promoted
        if crashed:
            self._supply.note_crash()
        if (differs := self._find_other_source(state)) is not None:
            return differs
        return outcomes.Prepared(crashed=crashed)

    def _connection(self) -> Connection:
        """Where claim, lease, checkpoint and effects are."""
        return self._databases.target.connection()

    def _find_promotion(self, timeline: int) -> outcomes.OwnershipLost | None:
        """Believe nothing that was stored on another timeline: the promoted standby may not have received all of it."""
        before, self._timeline = self._timeline, timeline
        if before in (None, timeline):
            return None
        return self._lose(f"the server was promoted (timeline {before} to {timeline}): what is stored is read again")

    def _find_other_source(self, state: ProcessorState) -> outcomes.OwnershipLost | None:
        """An owner that goes on after a reconnect does not come by `review`, which then says what is to be done.

        Behind a refusal it does.
        """
        if not self._context.config.has_remote_target or state.lease is None or state.refusal is not None:
            return None
        try:
            self._reader.source_timeline = self._databases.check_source(self._context.key)
        except ConfigurationError as err:
            return self._lose(str(err))
        return None

    def _lose(self, why: str) -> outcomes.OwnershipLost:
        """Forget what was read; an owner that waits for a person keeps no lease."""
        self._reader.messages.forget()
        self._context.ownership.drop_lease()
        return outcomes.OwnershipLost(why)

    def claim(self, _state: ProcessorState) -> outcomes.ClaimAnswered:
        """Ask for the claim."""
        context = self._context
        context.ownership.drop_lease()
        answer = ownership.claim(
            self._connection(),
            context.key,
            context.config.resource,
            force=self._force,
            sweep_uids=context.config.sweep_uids,
        )
        context.status.claim_holder = answer.holder
        if answer.granted:
            self._force = False
            context.ownership.note_claim()
            mappings.note(self._connection(), context.key, context.config.resource.uid, context.config.source)
            self._unit.after_claim(self._connection())
            return outcomes.ClaimAnswered(granted=True, holder=answer.holder)
        context.ownership.drop_claim()
        if self._force:
            self._end_stuck_transactions()
        if (successor := rebuilds.find_superseding(self._connection(), context.key)) is not None:
            raise ConfigurationError(
                f"processor {successor!r} replaced this one, which can never run again: delete this resource",
                reason=Reason.SUPERSEDED,
            )
        if answer.holder is None or answer.holder.uid == context.config.resource.uid:
            raise TransientError("the claim is being changed at this moment", reason=Reason.STARTING)
        return outcomes.ClaimAnswered(answer.granted, answer.holder)

    def review(self, _state: ProcessorState) -> outcomes.Reviewed:
        """See whether a conflict is open; carry out the person's decision, if the resource has one for it."""
        context = self._context
        connection = self._connection()
        found = conflicts.find_open(connection, context.key)
        note = ""
        if found is not None and context.config.resolution is not None:
            answer = conflicts.resolve(connection, context.key.schema, context.config.resolution)
            _log.info("a decision about a conflict", extra={"answer": answer.name, "conflict": found.id})
            note = _NOTES.get(answer, "")
            found = conflicts.find_open(connection, context.key)
        context.status.set_observed(conflicts=conflicts.summary(connection, context.key))
        if found is None:
            # Only now: a checkpoint beyond the server's transaction ids may be the conflict that a person is to rewind.
            self._reader.source_timeline = context.databases.check_source(context.key)
        return outcomes.Reviewed(found, note)

    def check_target(self, _state: ProcessorState) -> outcomes.TargetReady:
        """Look whether the target can work at all, and wait until batches can be prepared for it.

        Looked at here too: whether the processor is partitioned as the resource asks for. A process that is refused for
        that takes no share, as one whose target cannot work.
        """
        self._unit.check_mode(self._connection())
        self._context.shutdown.limited(self._timeout, self._context.target.check)
        self._supply.await_ready()
        return outcomes.TargetReady()

    def acquire(self, _state: ProcessorState) -> outcomes.StepOutcome:
        """Ask for the lease."""
        context, connection = self._context, self._connection()
        answer = ownership.acquire_lease(
            connection,
            context.key,
            claim_uid=context.config.resource.uid,
            pod=context.pod,
            token=context.token,
            lease=self._lease,
        )
        context.status.lease_pod = answer.pod
        if not answer.acquired or answer.epoch is None:
            refused = outcomes.LeaseAnswered(None, answer.pod, self._end_stuck_transactions())
            return self._unit.after_refusal(connection) or refused
        lease = outcomes.HeldLease(context.key.partition, answer.epoch, context.token)
        context.ownership.note_lease(lease)
        _log.info("lease acquired", extra={"epoch": answer.epoch})
        return outcomes.LeaseAnswered(lease)

    def _end_stuck_transactions(self) -> str:
        """Let no frozen process keep what is open to us; return what our role cannot end, for people.

        With our own lease the heartbeat goes on with it.
        """
        key = self._context.key
        stuck = ownership.end_stuck_transactions(self._connection(), key, {key.partition: None})
        if stuck.ended:
            _log.warning("ended transactions of a former owner's process that were stuck", extra={"count": stuck.ended})
        return stuck.left

    def load(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Load the checkpoint under the lease; see what former owners left."""
        if self._outside is not None:
            lease = lease_of(state)
            # Until it is done the other partitions have their turns: those that are new begin with it meanwhile.
            if seconds := self._outside.shut_out(self._database, lease.partition, lease.epoch):
                return outcomes.Throttled(seconds, Reason.RUNNING, "")
        try:
            loaded = self._load(state)
        except ConfigurationError as err:
            if err.reason is not Reason.PARTITIONS_DIFFER:
                raise
            self.release(state)  # another process stored it since this one looked: it needs the lease
            return self._lose(str(err))
        return self._unit.after_load() or loaded

    def _load(self, state: ProcessorState) -> outcomes.StepOutcome:
        lease = lease_of(state)
        connection = self._connection()
        self._unit.before_load(connection)
        try:
            # Before there is a row: who comes next and finds one could not tell that older records are not about it.
            begun_new = self._remembers and not self._unit.is_stored(connection)
            if begun_new:
                self._begin_target(lease, None)
            with connection.transaction():
                ownership.limit_transaction(connection, self._lease)
                found = self._unit.load(connection, lease)
                if found is not None and self._context.config.numbers_messages:
                    found = self._with_numbers(connection, lease, found)
        except checkpoints.TamperedError as err:
            # The worker that was told did not record it; or no worker was there to be told.
            context, edit = self._context, err.edit
            expected = checkpoints.find_expected(connection, context.key, context.config.source, edit)
            return outcomes.Rejected(edit.answer, expected, None, edit.stored)
        if found is None:
            return outcomes.OwnershipLost("the lease went before the start was stored")
        _log.info("checkpoint loaded", extra={"checkpoint": str(found.pair), "startFromUsed": found.start_from_used})
        review = holding.review(
            connection, self._context.key, lease, generation=self._context.config.fingerprint, forgive=state.forgiven
        )
        if review is None:
            return outcomes.OwnershipLost("the lease went before it was seen what former owners left")
        if self._remembers and not (begun_new and found.start_from_used):
            self._begin_target(lease, found.pair)
        return outcomes.Loaded(found.pair, found.start_from_used, review)

    def _with_numbers(
        self, connection: Connection, lease: outcomes.HeldLease, found: checkpoints.Start
    ) -> checkpoints.Start | None:
        mapping = describe_mapping(self._context.config)
        pair = checkpoints.open_numbers(connection, self._context.key, lease, found.pair, mapping)
        return None if pair is None else replace(found, pair=pair)

    def _begin_target(self, lease: outcomes.HeldLease, stored: Checkpoint | None) -> None:
        """Tell a target with transactions of its own for whom it works from now on; None: there is no row yet."""
        if self._outside is None:
            return
        self._runner.flush_log(self._connection())  # what the target writes down outlives a crash: so must these
        moved = checkpoints.fetch_last_move(self._connection(), self._context.key)
        begun = OwnerStart(self._database, self._context.key.partition, lease.epoch, stored, moved)
        try:
            self._context.shutdown.limited(self._timeout, partial(self._outside.begin_owner, begun))
        except Interrupted as err:
            raise TransientError(
                "the target did not say within delivery.timeout what former owners delivered; it is asked again",
                reason=Reason.DRAINING if err.draining else Reason.TARGET_UNAVAILABLE,
            ) from err

    def record(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Report a refusal in its own transaction; if a person must decide, give the lease back."""
        refused = state.refusal
        if refused is None:
            raise TransientError("no refusal to record", reason=Reason.INTERNAL_ERROR)
        context = self._context
        lease = lease_of(state)
        connection = self._connection()
        if refused.answer.needs_person:
            # A pool hides a crash and a failover: the row was not edited, the server has lost the latest commits.
            self._runner.check_run(connection)
            if (promoted := self._find_promotion(identity.fetch_timeline(connection, context.key.schema))) is not None:
                return promoted
        refusal = conflicts.Refusal(
            code=refused.answer,
            expected=refused.expected,
            stored=refused.stored,
            new=refused.new,
            epoch=lease.epoch,
            pod=context.pod,
            claim_uid=context.config.resource.uid,
            needs_person=refused.answer.needs_person,
        )
        number = conflicts.record_refusal(connection, context.key, refusal)
        if refused.answer.needs_person:
            # A rewind is refused while an owner is live.
            ownership.release_lease(connection, context.key, lease)
        context.ownership.drop_lease()
        context.status.set_observed(conflicts=conflicts.summary(connection, context.key))
        return outcomes.Recorded(number)

    def release(self, state: ProcessorState) -> outcomes.StepOutcome:
        """Give the lease back between two batches, so that another process can take it."""
        ownership.release_lease(self._connection(), self._context.key, lease_of(state))
        self._context.ownership.drop_lease()
        return outcomes.Released()


_NOTES = {
    conflicts.ResolveAnswer.PAIR_DIFFERS: "the decision on the resource names another pair than the one stored now",
    conflicts.ResolveAnswer.UNKNOWN: "the decision on the resource is about another conflict",
    conflicts.ResolveAnswer.OWNER_LIVE: "the decision waits until the last owner's lease is over",
}
