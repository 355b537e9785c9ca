"""Puts the steps of a process together. A mode is a row of `MODES`: how its units are owned, and what feeds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError
from outbox_core.spec import Mode
from outbox_worker.engine.effects import Effects
from outbox_worker.engine.handling import Handling
from outbox_worker.engine.owner_steps import ECHO_SECONDS, OwnerSteps, Preparation, WholeProcessor
from outbox_worker.engine.partition_steps import Partition, PartitionFeed
from outbox_worker.engine.steps import Steps, isolates
from outbox_worker.engine.stopped_steps import StoppedSteps
from outbox_worker.feeds.cursor import CheckpointSettling, CursorFeed
from outbox_worker.feeds.held import HeldFeed
from outbox_worker.feeds.partition_reader import PartitionReader
from outbox_worker.postgres.transactions.transaction import TransactionRunner
from outbox_worker.rebuild.rebuilding import Rebuilder, RebuildFeed, let_go

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_core.ports import Feed, OwnedUnit
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.ownership.membership import Membership

    BuildFeed = Callable[["Unit"], Feed]


class Unit:
    """One partition of a process, or all of a processor that is not partitioned: what its feed may need."""

    def __init__(self, context: StepContext, membership: Membership | None) -> None:
        """Make what all modes need; `membership` is what this process knows of the partitions, None: there are none."""
        delivery = context.config.delivery
        self.context = context
        self.runner = TransactionRunner(
            context.key, lease=delivery.lease_duration.total_seconds(), timeout=delivery.timeout.total_seconds()
        )
        self.reader = PartitionReader(context)
        self.cursor = CursorFeed(context, self.reader, self.runner)
        self._membership = membership

    @property
    def membership(self) -> Membership:
        """What this process knows of the partitions.

        Raises:
            ConfigurationError: the processor is not partitioned.

        """
        if self._membership is None:
            raise ConfigurationError("delivery.mode Partitioned needs delivery.partitions")
        return self._membership


@dataclass(frozen=True, slots=True)
class ModeRow:
    """A mode: how a unit is owned beyond claim and lease, and what finds its fresh batches."""

    own: Callable[[Unit], OwnedUnit]
    feed: BuildFeed


MODES: Final = {
    Mode.ORDERED: ModeRow(lambda unit: WholeProcessor(unit.context), lambda unit: unit.cursor),
    Mode.PARTITIONED: ModeRow(
        lambda unit: Partition(unit.context, unit.membership),
        lambda unit: PartitionFeed(unit.context, unit.cursor, unit.reader, unit.membership),
    ),
}


def build_steps(
    contexts: Sequence[StepContext], membership: Membership | None, *, take_over: bool, feed: BuildFeed | None = None
) -> list[Steps]:
    """Build the steps of each unit; the first one takes the claim over, if that is asked.

    Args:
        contexts: of the units of this process.
        membership: what this process knows of the partitions; None: the processor is not partitioned.
        take_over: claim although another resource holds the claim.
        feed: an engine's own, in place of the mode's.

    Raises:
        ConfigurationError: the resource's fields do not go together.

    """
    preparation = Preparation(0.0 if membership is None else ECHO_SECONDS)
    mode = MODES[contexts[0].config.delivery.mode]
    rebuilds = feed is None and contexts[0].config.rebuild_of is not None
    build_feed = feed or mode.feed
    steps = []
    for context in contexts:
        first, unit = context is contexts[0], Unit(context, membership)
        found = build_feed(unit)
        if first and rebuilds:
            found = RebuildFeed(Rebuilder(context, unit.runner, on_swapped=lambda: let_go(contexts)), found)
        owner = OwnerSteps(
            context, unit.runner, unit.reader, found, mode.own(unit), preparation, take_over=take_over and first
        )
        held, settling = HeldFeed(context), CheckpointSettling(context, unit.reader, unit.runner)
        handling = Handling(context, unit.runner, Effects(context), found, settling, held, isolates=isolates(context))
        steps.append(Steps(context, owner, found, handling, held, StoppedSteps(context, unit.reader)))
    return steps
