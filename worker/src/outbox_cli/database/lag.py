"""What waits for a processor, in every mode: shared by `status` and `lag`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.progress.checkpoint import BEGINNING
from outbox_core.spec import Competing
from outbox_worker.postgres.feeds import competing
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.dispatch_reader import DispatchReader

if TYPE_CHECKING:
    from outbox_cli.console import Record
    from outbox_cli.context import Subject
    from outbox_cli.database.sources import Sources
    from outbox_core.report import Lag
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.connection import Connection


class LagReader:
    """Measures what waits, by each processor's mode."""

    def __init__(self, connection: Connection, subject: Subject, sources: Sources) -> None:
        """See which processors are in mode Competing; `connection` is to the checkpoints."""
        self._connection = connection
        self._subject = subject
        self._sources = sources
        self._queues = competing.list_competing(connection, subject.schema)

    def lag(self, view: ProcessorView, reading: Connection, cap: int) -> Lag:
        """Count what is not handled, at most about `cap`; `reading` is to the processor's messages."""
        if view.processor_id not in self._queues:
            return self._sources.reader(view).lag(reading, view.pair or BEGINNING, cap)
        source = self._sources.source_of(view.processor_id)
        reader = DispatchReader(source, Competing(queue=self._queues[view.processor_id]), view.processor_id)
        return competing.measure_lag(self._connection, self._key(view), reader, cap)

    def unfinished(self, view: ProcessorView) -> Record:
        """Say what is handed out to consumers and not done; nothing of other modes."""
        if view.processor_id not in self._queues:
            return {}
        found = competing.count_unfinished(self._connection, self._key(view))
        return {"queue": self._queues[view.processor_id], "unfinished": found.model_dump(by_alias=True)}

    def with_consumers(self, view: ProcessorView) -> ProcessorView:
        """In mode Competing no process holds a lease: every live consumer works."""
        if view.processor_id not in self._queues:
            return view
        return competing.with_consumers(self._connection, self._subject.schema, view)

    def _key(self, view: ProcessorView) -> ProcessorKey:
        return ProcessorKey(self._subject.schema, view.processor_id)
