"""The one message that a partition stops at: naming it for a person, and looking what they decided.

`outbox_core.processor.stopping` decides.
"""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError, OutboxError
from outbox_core.processor import outcomes
from outbox_core.processor.state import Step
from outbox_core.processor.stopping import Named
from outbox_core.spec import Engine, Mode
from outbox_worker.postgres.connection import limited
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.feeds import holding

if TYPE_CHECKING:
    from outbox_core.message import Batch
    from outbox_core.processor.state import ProcessorState
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.feeds.partition_reader import PartitionReader

DEFAULT_SCHEMA = "outbox"
_NAMING_SECONDS: Final = 1.0
"""A name is for a person: where it takes longer (the table is locked), it is asked for again later."""


class StoppedSteps:
    """Names a message that stops its partition, and looks whether a person gave it up."""

    def __init__(self, context: StepContext, reader: PartitionReader | None = None) -> None:
        """Keep the context; without a reader no batch is looked up: its message is known."""
        self._context = context
        self._reader = reader

    def name_failed(self, state: ProcessorState, failed: outcomes.Failed) -> outcomes.Failed:
        """Say which message failed alone; a batch of several, or one that cannot be read now, stays without a name."""
        batch = state.batch
        alone = batch is not None and batch.matched_count == 1 and not batch.held and state.step is Step.HANDLE
        return replace(failed, message=self._try_name(batch)) if batch is not None and alone else failed

    def _try_name(self, batch: Batch) -> Named | None:
        if self._reader is None or self._context.config.engine is not Engine.WORKER:
            return None
        with suppress(OutboxError, DatabaseError):
            connection = self._context.databases.source.connection()
            with limited(connection, _NAMING_SECONDS):
                found = holding.find_message(connection, self._reader.in_source(batch))
            return None if found is None else self.name(found)
        return None

    def name(self, found: holding.FoundMessage) -> Named:
        """Say which message it is, and how a person gives it up."""
        of_type = "without a type" if found.message_type is None else f"of type {found.message_type!r}"
        text = f"message {found.message_id!r} {of_type}, key {found.key!r}, {found.place}"
        return Named(str(found.place), text, self._remedy(str(found.place)))

    def _remedy(self, place: str) -> str:
        key = self._context.key
        command = ["outbox", "dead-letters", "add", key.processor_id, "--at", place]
        if self._context.config.delivery.mode is Mode.PARTITIONED:
            command += ["--partition", str(key.partition)]
        if key.schema != DEFAULT_SCHEMA:
            command += ["--schema", key.schema]
        return shlex.join([*command, "--reason", "it stopped the processor"])

    def look_for_decision(self, state: ProcessorState) -> outcomes.Decision:
        """See whether a person gave the message up; name it first, where that failed before."""
        stopped = state.stopped
        if stopped is not None and stopped.unnamed is not None:
            return outcomes.Decision(given_up=False, named=self._try_name(stopped.unnamed))
        if stopped is None or stopped.place is None:
            return outcomes.Decision(given_up=False)
        try:
            found = holding.is_given_up(self._context.databases.target.connection(), self._context.key, stopped.place)
        except ConfigurationError:
            found = False  # this role may not read what people decided
        return outcomes.Decision(given_up=found)
