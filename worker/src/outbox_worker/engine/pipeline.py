"""Lets the target take the batches behind the one in hand before that one is confirmed.

The target is never idle while a checkpoint is stored or a batch is read. What is stored follows the oldest batch: the
one in hand is delivered and stored before the next one is, whatever was confirmed of that. `docs/model/Pipeline.tla`
checks it. A batch is begun only in a backlog in which nothing fails, waits or is asked to stop; each of those ends with
the batches that were begun before.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from outbox_core.errors import OutboxError
from outbox_core.processor import outcomes
from outbox_core.processor.state import lease_of
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
        """Keep the collaborators."""
        self._delivery = context.config.delivery
        self._throttle = context.throttle
        self._shutdown = context.shutdown
        self._effects = effects
        self._feed = feed
        self._fresh = fresh

    def fill(self, state: ProcessorState, batch: Batch) -> tuple[Batch, ...]:
        """Let the target begin to take the batch in hand and, in a backlog, those that follow.

        Returns:
            The batches that follow and were begun now, in order.

        Raises:
            OutboxError: the target cannot take them.

        """
        epoch, last = lease_of(state).epoch, state.following[-1] if state.following else batch
        room = self._effects.most_under_way - 1 - len(state.following)
        if room <= 0 or not self._goes_on(state, last):
            return ()
        if not state.begun:
            self._effects.begin(batch, epoch)
        begun: list[Batch] = []
        while len(begun) < room and self._goes_on(state, last):
            found = self._find(state, last)
            if found is None:
                break
            self._effects.begin(found, epoch)
            begun.append(found)
            last = found
        return tuple(begun)

    def _goes_on(self, state: ProcessorState, last: Batch) -> bool:
        """Say whether another batch will most likely be asked for after this one, and would be handed over at once."""
        most, now = self._delivery.batch_limit, time.monotonic()
        return (
            last.matched_count > 1  # who asks for single messages wants each confirmed before the next one
            and is_backlog(state, last, self._throttle.limit(most), most)
            and self._delivery.rate_limit is None
            and not (state.blocking or last.excluded or last.held)
            and now < state.look_by
            and now < state.held_due
            and not self._shutdown.requested
        )

    def _find(self, state: ProcessorState, last: Batch) -> Batch | None:
        """Read what follows, and look at the lease right before it is handed over; None: that is for a later step."""
        try:
            fetched = self._feed.fetch(replace(state, cursor=last.examined, batch=None))
            if not isinstance(fetched, outcomes.Fetched) or not fetched.batch.matched_count:
                return None
            batch = fetched.batch
            plain = not (batch.excluded or batch.delayed_count or batch.waits_for)
            return batch if plain and self._fresh.find_loss(state, batch) is None else None
        except (OutboxError, DatabaseError):
            return None  # the step that reads, or stores, tells it
