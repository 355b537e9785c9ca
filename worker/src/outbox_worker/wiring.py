"""Puts the parts of a process together. A mode is a row of `MODES`: all that tells it from the others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError
from outbox_core.spec import Mode
from outbox_worker.competing.consumer import ThisConsumer
from outbox_worker.competing.steps import CompetingSteps
from outbox_worker.engine.effects import Effects
from outbox_worker.engine.handling import Handling
from outbox_worker.engine.owner_steps import ECHO_SECONDS, NothingPrepared, OwnerSteps, Preparation, WholeProcessor
from outbox_worker.engine.partition_steps import Partition, PartitionFeed
from outbox_worker.engine.steps import Steps, steps_of_an_owner
from outbox_worker.engine.stopped_steps import StoppedSteps
from outbox_worker.feeds.cursor import CheckpointSettling, CursorFeed, WholeFeed
from outbox_worker.feeds.held import HeldFeed
from outbox_worker.feeds.partition_reader import PartitionReader
from outbox_worker.observe.sight import CompetingSight, PartitionedSight, Sight
from outbox_worker.ownership.membership import Membership
from outbox_worker.ownership.renewal import BatchRenewal, LeaseRenewal, MembershipRenewal
from outbox_worker.postgres.transactions.transaction import TransactionRunner
from outbox_worker.rebuild.rebuilding import Rebuilder, RebuildFeed, let_go

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Feed, OwnedUnit
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.ownership.heartbeat import Ownership
    from outbox_worker.ownership.renewal import Renewal
    from outbox_worker.postgres.key import ProcessorKey

    BuildFeed = Callable[["Unit"], Feed]


@dataclass
class Replica:
    """This process, and what it knows of the other processes of its processor."""

    config: ProcessorConfig
    key: ProcessorKey
    pod: str
    pod_uid: str
    token: UUID
    asked: int | None
    """How many partitions the resource wants; None: none."""

    @cached_property
    def membership(self) -> Membership:
        """Mode Partitioned: which partitions this process shall own.

        Raises:
            ConfigurationError: the processor is not partitioned.

        """
        partitions = self.config.delivery.partitions
        if partitions is None:
            raise ConfigurationError("delivery.mode Partitioned needs delivery.partitions")
        return Membership(partitions.count, self.token, asked=self.asked)

    @cached_property
    def consumer(self) -> ThisConsumer:
        """Mode Competing: what takes batches in this process's name.

        Raises:
            ConfigurationError: the resource does not say how, or asks for what this mode has not.

        """
        if self.config.rebuild_of is not None:
            raise ConfigurationError(
                "rebuildOf needs delivery.mode Ordered or Partitioned: batches have no place to compare"
            )
        return ThisConsumer(self.config, self.key, self.pod, self.pod_uid, self.token)


class Unit:
    """One partition of a process, or all of a processor that is not partitioned: what its steps are made of."""

    def __init__(self, context: StepContext, replica: Replica) -> None:
        delivery, is_shared = context.config.delivery, context.databases.is_shared
        self.context = context
        self.replica = replica
        self.runner = TransactionRunner(
            context.key, lease=delivery.lease_duration.total_seconds(), timeout=delivery.timeout.total_seconds(),
            wal=None if context.config.has_remote_target else context.databases.wal,
            can_rest=delivery.mode is Mode.ORDERED and context.config.rebuild_of is None and not is_shared,
            is_shared=is_shared,
        )  # fmt: skip
        self.reader = PartitionReader(context)

    @cached_property
    def cursor(self) -> CursorFeed:
        """Reads after the checkpoint."""
        return CursorFeed(self.context, self.reader, self.runner)


@dataclass(frozen=True, slots=True)
class ModeRow:
    """A mode.

    Attributes:
        own: how a unit is owned, beyond claim and lease.
        feed: finds the fresh batches of a unit that is owned by a lease; None: each batch has an owner of its own.
        renewal: what the heartbeat renews.
        sight: what the observer sees.

    """

    own: Callable[[Unit], OwnedUnit]
    feed: BuildFeed | None
    renewal: Callable[[Replica, Sequence[Ownership]], Renewal]
    sight: Callable[[Replica, ProcessStatus], Sight]


MODES: Final = {
    Mode.ORDERED: ModeRow(
        own=lambda unit: WholeProcessor(unit.context),
        feed=lambda unit: WholeFeed(unit.cursor) if unit.context.databases.is_shared else unit.cursor,
        renewal=lambda replica, held: LeaseRenewal(replica.key, replica.config.delivery.lease_duration, held[0]),
        sight=lambda replica, _: Sight(replica.key),
    ),
    Mode.PARTITIONED: ModeRow(
        own=lambda unit: Partition(unit.context, unit.replica.membership),
        feed=lambda unit: PartitionFeed(unit.context, unit.cursor, unit.reader, unit.replica.membership),
        renewal=lambda replica, held: MembershipRenewal(
            replica.key, replica.config.delivery.lease_duration, held, replica.membership,
            replica.config.resource.uid, replica.pod,
        ),
        sight=lambda replica, status: PartitionedSight(replica.key, status, replica.config, replica.membership),
    ),
    Mode.COMPETING: ModeRow(
        own=lambda unit: WholeProcessor(unit.context),
        feed=None,
        renewal=lambda replica, held: BatchRenewal(replica.key, held[0], replica.consumer),
        sight=lambda replica, status: CompetingSight(replica.key, status, replica.config, replica.consumer),
    ),
}  # fmt: skip


def build_steps(
    contexts: Sequence[StepContext], replica: Replica, *, take_over: bool, feed: BuildFeed | None = None
) -> list[Steps]:
    """Build the steps of each unit; `feed` is an engine's own, in place of the mode's.

    `take_over`: the first one claims although another resource holds the claim.

    Raises:
        ConfigurationError: the resource's fields do not go together.

    """
    mode = MODES[replica.config.delivery.mode]
    preparation = Preparation(ECHO_SECONDS if len(contexts) > 1 else 0.0)
    rebuilds = feed is None and replica.config.rebuild_of is not None
    steps = []
    for context in contexts:
        first, unit = context is contexts[0], Unit(context, replica)
        build_feed, found = feed or mode.feed, None
        if build_feed is not None:
            found = build_feed(unit)
            if first and rebuilds:
                found = RebuildFeed(Rebuilder(context, unit.runner, on_swapped=lambda: let_go(contexts)), found)
        owner = OwnerSteps(
            context, unit.runner, unit.reader, found or NothingPrepared(), mode.own(unit), preparation,
            take_over=take_over and first,
        )  # fmt: skip
        steps.append(_of_batches(unit, owner) if found is None else _of_an_owner(unit, owner, found))
    return steps


def _of_an_owner(unit: Unit, owner: OwnerSteps, feed: Feed) -> Steps:
    """A unit that is owned by a lease, and read after its checkpoint."""
    context, held = unit.context, HeldFeed(unit.context)
    settling = CheckpointSettling(context, unit.reader, unit.runner)
    handling = Handling(context, unit.runner, Effects(context), feed, settling, held)
    stopped = StoppedSteps(context, unit.reader)
    return Steps(owner, stopped, steps_of_an_owner(context, owner, feed, handling, held))


def _of_batches(unit: Unit, owner: OwnerSteps) -> Steps:
    """Each batch has an owner: this process takes some of them."""
    consumer, stopped = unit.replica.consumer, StoppedSteps(unit.context)
    taking = CompetingSteps(unit.context, unit.runner, stopped, consumer)
    return Steps(owner, stopped, taking.actions, consumer.share)
