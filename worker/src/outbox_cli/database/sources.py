"""Where a processor's messages are, for a command that counts them: mostly beside its checkpoint, else in the source's.

What is counted in the wrong database is a lie, so the checkpoint's own record decides, and a source that is not the one
written there is refused.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from outbox_cli.context import connect_source, names_source, target_directory
from outbox_cli.errors import RefusedError
from outbox_worker.observe.change import part_reader
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.admin.mappings import list_mappings
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.reading.messages import MessageReader

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Self

    from outbox_cli.command import Context
    from outbox_core.spec import Source
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.connection import Connection


class Sources:
    """Finds the connection to each processor's messages; opens the source's database at most once."""

    def __init__(self, target: Connection, context: Context) -> None:
        """Keep the connection to the checkpoints."""
        self._target = target
        self._context = context
        self._closing = ExitStack()
        self._source_connection: Connection | None = None
        self._mappings: Mapping[str, Source] | None = None

    def source_of(self, processor_id: str) -> Source:
        """Table and filters of a processor: the manifest's, else what its owner wrote down, else our own table's."""
        subject = self._context.subject
        if getattr(self._context.options, "file", None):
            return subject.source
        if self._mappings is None:
            self._mappings = list_mappings(self._target, subject.schema)
        return self._mappings.get(processor_id, subject.source)

    def __enter__(self) -> Self:
        """Nothing is opened yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close what was opened."""
        self._closing.close()

    def find(self, processor_id: str) -> Connection | None:
        """Return the connection to the processor's messages; None: they are in a database that was not named.

        Raises:
            RefusedError: the source that was named is not the processor's.

        """
        written = remote_target.fetch_source(self._target, ProcessorKey(self._context.subject.schema, processor_id))
        if written is None:
            return self._target
        if not self._is_named:
            return None
        connection, identity = self._open(self.source_of(processor_id))
        if written.identity not in (None, identity):
            raise RefusedError(f"processor {processor_id} reads {written.described}, which is not the source you name")
        return connection

    def need(self, processor_id: str) -> Connection:
        """Return the connection to the processor's messages.

        Raises:
            RefusedError: they are in a database that was not named, or in another one.

        """
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

    @property
    def _is_named(self) -> bool:
        options, environment = self._context.options, self._context.environment
        return target_directory(options) is not None and names_source(options, environment)

    def _open(self, source: Source) -> tuple[Connection, str]:
        if self._source_connection is None:
            self._source_connection = connect_source(self._context.options, self._context.environment)
            self._closing.enter_context(self._source_connection)
        return self._source_connection, remote_target.identify(self._source_connection, source).identity

    def reader(self, view: ProcessorView) -> MessageReader:
        """Return the reader of the partition's own messages, divided as the database says."""
        source = self.source_of(view.processor_id)
        if view.partitioning is None:
            return MessageReader(source)
        return part_reader(source, replace(view.partitioning, barrier=None), view.partition)
