"""Where a processor's messages are, mostly beside its checkpoint, else in the source's database; and how much waits.

What is counted in the wrong database is a lie, so the checkpoint's own record decides, and a source that is not the one
written there is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from outbox_cli.errors import RefusedError
from outbox_core.progress.checkpoint import BEGINNING
from outbox_core.spec import Competing, Source
from outbox_worker.observe.change import part_reader
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.admin.mappings import list_mappings
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader
from outbox_worker.postgres.reading.messages import MessageReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_cli.console import Record
    from outbox_cli.context import Context
    from outbox_core.report import Lag
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.connection import Connection


class Sources(ExitStack):
    """Finds and counts each processor's messages; opens the source's database at most once, and closes it."""

    def __init__(self, target: Connection, context: Context) -> None:
        super().__init__()
        self._target = target
        self._context = context

    @cached_property
    def queues(self) -> Mapping[str, str | None]:
        """The queue of each processor in mode Competing; None: the outbox."""
        return competing.list_competing(self._target, self._context.schema)

    def source_of(self, processor_id: str) -> Source:
        """Table and filters of a processor: the manifest's, else what its owner wrote down, else our own table's."""
        source = self._context.source
        return source if self._context.manifest else self._mappings.get(processor_id, source)

    def find(self, processor_id: str) -> Connection | None:
        """Return the connection to the processor's messages; None: their database was not named; another is refused."""
        written = remote_target.fetch_source(self._target, self._key(processor_id))
        if written is None:
            return self._target
        if not self._context.names_both:
            return None
        identity = remote_target.identify(self._source_connection, self.source_of(processor_id)).identity
        if written.identity not in (None, identity):
            raise RefusedError(f"processor {processor_id} reads {written.described}, which is not the source you name")
        return self._source_connection

    def need(self, processor_id: str) -> Connection:
        """Return the connection to the processor's messages, or refuse where their database was not named."""
        found = self.find(processor_id)
        if found is None:
            raise RefusedError(
                f"processor {processor_id} reads another database than the one that holds its checkpoint: name that "
                "one with --target-connection DIR, and the source with --connection DIR"
            )
        return found

    def has_remote_target(self, processor_id: str) -> bool:
        """Say whether the processor's messages are in another database than its checkpoint."""
        return self.find(processor_id) is not self._target

    def reader(self, view: ProcessorView) -> MessageReader:
        """Return the reader of the partition's own messages, partitioned as the database says."""
        source = self.source_of(view.processor_id)
        if view.partitioning is None:
            return MessageReader(source)
        return part_reader(source, replace(view.partitioning, barrier=None), view.partition)

    def lag(self, view: ProcessorView, reading: Connection, cap: int) -> Lag:
        """Count what is not handled, at most about `cap`; `reading` is to the processor's messages."""
        if view.processor_id not in self.queues:
            return self.reader(view).lag(reading, view.pair or BEGINNING, cap)
        mode = Competing(queue=self.queues[view.processor_id])
        reader = DispatchReader(self.source_of(view.processor_id), mode, view.processor_id)
        return competing.measure_lag(self._target, self._key(view.processor_id), reader, cap)

    def unfinished(self, view: ProcessorView) -> Record:
        """Say what is handed out to consumers and not done; nothing of other modes."""
        if view.processor_id not in self.queues:
            return {}
        found = competing.count_unfinished(self._target, self._key(view.processor_id))
        return {"queue": self.queues[view.processor_id], "unfinished": found.model_dump(by_alias=True)}

    def with_consumers(self, view: ProcessorView) -> ProcessorView:
        """In mode Competing no process holds a lease: every live consumer works."""
        if view.processor_id not in self.queues:
            return view
        return competing.with_consumers(self._target, self._context.schema, view)

    @cached_property
    def _mappings(self) -> Mapping[str, Source]:
        return list_mappings(self._target, self._context.schema)

    @cached_property
    def _source_connection(self) -> Connection:
        return self.enter_context(self._context.connect_source())

    def _key(self, processor_id: str) -> ProcessorKey:
        return ProcessorKey(self._context.schema, processor_id)
