"""Lets the target take the batches behind the one in hand before that one is stored, or even confirmed.

The target is never idle while a checkpoint is stored or a batch is read. What is stored follows the oldest batch: the
one in hand is delivered and stored before the next one is, although that may be confirmed already.
`docs/model/Pipeline.tla` checks it. A batch is begun only in a backlog in which nothing fails, waits or is asked to
stop; each of those ends with the batches that were begun before.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from outbox_core.errors import OutboxError
from outbox_core.processor import outcomes
from outbox_core.processor.state import lease_of
from outbox_core.progress.numbering import is_numbered, number_batch
from outbox_worker.feeds.cursor import is_backlog
from outbox_worker.postgres.errors import DatabaseError

if TYPE_CHECKING:
    from outbox_core.message import Batch
    from outbox_core.ports import Feed
    from outbox_core.processor.state import ProcessorState
    from outbox_worker.engine.effects import Effects
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.feeds.cursor import CheckpointSettling


class Pipeline:
    """What of one unit the target has begun to take."""

    def __init__(self, context: StepContext, effects: Effects, feed: Feed, fresh: CheckpointSettling) -> None:
        self._delivery = context.config.delivery
        self._throttle = context.throttle
        self._shutdown = context.shutdown
        self._effects = effects
        self._feed = feed
        self._fresh = fresh

    def deliver(self, state: ProcessorState, batch: Batch) -> outcomes.Delivered:
        """Deliver the batch in hand and, in a backlog, let the target begin to take those that follow.

        Raises:
            OutboxError: the target does not take the batch in hand, or cannot begin with one before that is confirmed.

        """
        epoch, last = lease_of(state).epoch, state.following[-1] if state.following else batch
        room = self._effects.most_under_way - 1 - len(state.following)
        if room <= 0 or not self._goes_on(state, last):
            return outcomes.Delivered(self._effects.deliver(batch, epoch))
        if not state.begun:
            self._effects.begin(batch, epoch)
        if self._effects.awaits_confirms:
            found = self._find(state, last)  # while the target takes the one in hand
            return outcomes.Delivered(self._effects.deliver(batch, epoch), self._begin_next(state, found))
        following = self._fill(state, last, room)
        return outcomes.Delivered(self._effects.deliver(batch, epoch), following)

    def _fill(self, state: ProcessorState, last: Batch, room: int) -> tuple[Batch, ...]:
        """Let the target begin to take what follows before the batch in hand is confirmed; return it, in order."""
        begun: list[Batch] = []
        while len(begun) < room and self._goes_on(state, last):
            found = self._find(state, last)
            if found is None or not self._still_owns(state, found):
                break
            self._effects.begin(found, lease_of(state).epoch)
            begun.append(found)
            last = found
        return tuple(begun)

    def _begin_next(self, state: ProcessorState, found: Batch | None) -> tuple[Batch, ...]:
        """Let the target begin with what follows a batch that it has just confirmed; return what was begun."""
        if found is None or not self._still_owns(state, found):
            return ()
        try:
            self._effects.begin(found, lease_of(state).epoch)
        except (OutboxError, DatabaseError):
            return ()  # the step that delivers it, or stores, tells it
        return (found,)

    def _goes_on(self, state: ProcessorState, last: Batch) -> bool:
        """Say whether another batch will most likely be asked for after this one, and would be handed over at once."""
        most, now = self._delivery.batch_limit, time.monotonic()
        return (
            last.matched_count > 1  # who asks for single messages wants each confirmed before the next one
            and is_backlog(state, last, self._throttle.limit(most), most)
            and self._delivery.rate_limit is None
            and not (state.blocking or last.excluded or last.held)
            and is_numbered(last)
            and now < state.look_by
            and now < state.held_due
            and not self._shutdown.requested
        )

    def _find(self, state: ProcessorState, last: Batch) -> Batch | None:
        """Read what follows; None: that is for a later step."""
        try:
            fetched = self._feed.fetch(state._replace(cursor=last.examined, batch=None))
        except (OutboxError, DatabaseError):
            return None  # the step that reads, or stores, tells it
        if not isinstance(fetched, outcomes.Fetched) or not fetched.batch.matched_count:
            return None
        # What is begun before the one ahead is confirmed has no numbers: a message of that one may yet be left out.
        before = last.examined if self._effects.awaits_confirms else state.stored
        batch = number_batch(fetched.batch, before)
        return None if batch.excluded or batch.delayed_count or batch.waits_for else batch

    def _still_owns(self, state: ProcessorState, batch: Batch) -> bool:
        """Look at the lease right before a batch is handed over: the process may have been frozen since it was read."""
        try:
            return self._fresh.find_loss(state, batch) is None
        except (OutboxError, DatabaseError):
            return False  # the step that stores tells it
