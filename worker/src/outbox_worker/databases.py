"""Which database holds what: messages in the source's, effects and checkpoint there too or in the target's.

`target` is where claim, lease, checkpoint, conflicts and effects are, `source` where the messages are. Mostly they are
one session. Where they are two, the source is only read: our schema is brought up in the target's database, and the
checkpoint remembers which source its pairs are of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from outbox_core.errors import ConfigurationError
from outbox_core.spec import Engine, Mode
from outbox_worker.postgres import identity, remote_target, schema
from outbox_worker.postgres.connection import ConnectionFiles
from outbox_worker.postgres.progress import checkpoints
from outbox_worker.postgres.reading.ahead import ReadAhead
from outbox_worker.postgres.reading.arrivals import Arrivals
from outbox_worker.postgres.reading.shared_look import SharedLook
from outbox_worker.postgres.reading.wal_watch import WalWatch
from outbox_worker.session import Session

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.settings import Settings


@dataclass(frozen=True, slots=True)
class Databases:
    """The sessions of one thread, and what must be so in both databases before anything is done.

    `ahead`: a third connection, that reads the next batch of a backlog. None where the messages are in another server
    than the checkpoint: what says there in which run it is, need not be. `wal`: a connection to the source that waits
    for messages; None: for engine Spark, whose batches are worth waiting for. `look`: what the partitions of a process
    found along the positions. `arrivals`: whether a message came for any of them, or for any of several processors;
    None: for one that is not partitioned. `is_shared`: with other processors.
    """

    config: ProcessorConfig
    target: Session
    source: Session
    ahead: ReadAhead | None = None
    wal: WalWatch | None = None
    look: SharedLook = field(default_factory=SharedLook)
    arrivals: Arrivals | None = None
    is_shared: bool = False

    @property
    def opened(self) -> tuple[int, int]:
        """Tell these connections from those that were open before."""
        return self.target.opened, self.source.opened

    def discard(self) -> None:
        """Close all."""
        self.target.discard()
        self.source.discard()
        self.look.forget()
        if self.arrivals is not None:
            self.arrivals.forget()
        if self.ahead is not None:
            self.ahead.close()
        if self.wal is not None:
            self.wal.close()

    def prepare(self) -> identity.Identity:
        """Check, or bring up, schema and table; and whether the rows were written in this database. Return home's.

        Raises:
            OutboxError: something is missing, or a database cannot be reached.

        """
        target, source = self.target.connection(), self.config.source
        identity.refuse_standby(target)
        owner = identity.Owner(self.config.processor_id, self.config.resource)
        if not self.config.has_remote_target:
            schema.ensure_schema(target, source)
            return identity.check_identity(target, source, owner=owner)
        schema.bring_up(target, source)
        # Claims and checkpoints of a copied target are as wrong as those of a copied source.
        found = identity.check_identity(target, source.model_copy(update={"table": None}), owner=owner)
        reading = self.source.connection()
        identity.refuse_standby(reading)
        schema.check_table(reading, source)
        remote_target.identify(reading, source)
        return found

    def check_source(self, key: ProcessorKey) -> int | None:
        """As the claim's holder: look that the checkpoint is of this source, and that the source has reached it.

        Return on which timeline a source is that is another database than the checkpoint's.

        Raises:
            ConfigurationError: `SourceDiffers`, `DatabaseCopied`, `DatabaseBehind`.

        """
        target, uid = self.target.connection(), self.config.resource.uid
        if not self.config.has_remote_target:
            identity.check_identity(target, self.config.source, key)
            remote_target.bind(target, key, uid, None)
            return None
        source = remote_target.identify(self.source.connection(), self.config.source)
        remote_target.bind(target, key, uid, source)
        stored = checkpoints.load(target, key)
        remote_target.check_reach(source, stored.pair if stored is not None else None)
        return source.timeline


def open_databases(config: ProcessorConfig, settings: Settings, application_name: str) -> Databases:
    """Make the sessions of one thread; nothing is connected yet."""
    remote, connection = config.has_remote_target, config.target and config.target.connection
    files = ConnectionFiles(settings.source, config.source.connection.secret_ref.name)
    source = Session(files, application_name, "the source's database" if remote else "")
    wal = WalWatch(partial(source.another, "waiting")) if config.engine is Engine.WORKER else None
    if not remote:
        arrivals, partitions = None, config.delivery.partitions
        if partitions is not None:
            # A key inside the payload would cost more to compute than a read in vain.
            in_column = partitions.key.data is None and partitions.key.metadata is None
            arrivals = Arrivals(config.source, config.processor_id, partitions.key if in_column else None)
        return Databases(config, source, source, ReadAhead(partial(source.another, "ahead")), wal, arrivals=arrivals)
    files = ConnectionFiles(settings.target, connection.secret_ref.name if connection else "")
    target = Session(files, application_name, "the target's database")
    return Databases(config, target, source, wal=wal)


class SharedDatabases:
    """The sessions of one thread that works for several processors, which have their source in one database."""

    def __init__(self, first: Settings, application_name: str) -> None:
        """Make them by the files of the first processor; nothing is connected yet."""
        self._directory = first.source
        self._session = Session(ConnectionFiles(self._directory, self._directory.name), application_name)
        self._ahead = ReadAhead(partial(self._session.another, "ahead"))
        self._wal = WalWatch(partial(self._session.another, "waiting"))
        self._arrivals: dict[str, Arrivals] = {}

    def of(self, config: ProcessorConfig, settings: Settings) -> Databases:
        """Return those of one processor.

        Raises:
            ConfigurationError: it needs a process of its own.

        """
        delivery, own = config.delivery, ""
        if settings.source != self._directory:
            own = f"source.connection names another Secret than {self._directory.name!r}, the first one's"
        elif config.has_remote_target:
            own = "its checkpoint is in another database than its messages"
        elif config.engine is not Engine.WORKER:
            own = f"engine is {config.engine}"
        elif delivery.mode is Mode.PARTITIONED:
            own = "delivery.mode is Partitioned"
        elif config.target is not None and config.target.python is not None:
            own = "target.python is code of its own"
        elif config.rebuild_of is not None:
            own = "it has rebuildOf"
        if own:
            raise ConfigurationError(
                f"processor {config.processor_id!r} cannot share a process: {own}; run it in one of its own"
            )
        table = config.source.model_dump_json(include={"schema_name", "table", "publications"})  # all that a look reads
        if table not in self._arrivals:
            self._arrivals[table] = Arrivals(config.source, config.processor_id)
        return Databases(
            config, self._session, self._session, self._ahead, self._wal, arrivals=self._arrivals[table],
            is_shared=True,
        )  # fmt: skip
