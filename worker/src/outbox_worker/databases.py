"""Which database holds what: messages in the source's, effects and checkpoint there too or in the target's.

`home` is where claim, lease, checkpoint, conflicts and effects are, `reading` where the messages are. Mostly they are
one session. Where they are two, the source is only read: our schema is brought up in the target's database, and the
checkpoint remembers which source its pairs are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from outbox_worker.postgres import apart, checkpoints, identity, schema
from outbox_worker.postgres.connection import ConnectionFiles
from outbox_worker.session import Session

if TYPE_CHECKING:
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_worker.postgres.key import ProcessorKey

SOURCE: Final = "source"
TARGET: Final = "target"


@dataclass(frozen=True, slots=True)
class Databases:
    """The sessions of one thread, and what must be so in both databases before anything is done."""

    config: ProcessorConfig
    home: Session
    reading: Session

    @property
    def apart(self) -> bool:
        """They are two."""
        return self.home is not self.reading

    @property
    def opened(self) -> tuple[int, int]:
        """Tell these connections from those that were open before."""
        return self.home.opened, self.reading.opened

    def discard(self) -> None:
        """Close both."""
        self.home.discard()
        self.reading.discard()

    def prepare(self) -> identity.Identity:
        """Check, or bring up, schema and table; and whether the rows were written in this database. Return home's.

        Raises:
            OutboxError: something is missing, or a database cannot be reached.

        """
        home, source = self.home.connection(), self.config.source
        identity.refuse_standby(home)
        owner = identity.Owner(self.config.processor_id, self.config.resource)
        if not self.apart:
            schema.ensure_schema(home, source)
            return identity.check_identity(home, source, owner=owner)
        schema.bring_up(home, source)
        # Claims and checkpoints of a copied target are as wrong as those of a copied source.
        found = identity.check_identity(home, source.model_copy(update={"table": None}), owner=owner)
        reading = self.reading.connection()
        identity.refuse_standby(reading)
        schema.check_table(reading, source)
        apart.identify(reading, source)
        return found

    def check_source(self, key: ProcessorKey) -> None:
        """As the claim's holder: look that the checkpoint is of this source, and that the source has reached it.

        Raises:
            ConfigurationError: `SourceDiffers`, `DatabaseCopied`, `DatabaseBehind`.

        """
        home, uid = self.home.connection(), self.config.resource.uid
        if not self.apart:
            identity.check_identity(home, self.config.source, key)
            apart.bind(home, key, uid, None)
            return
        source = apart.identify(self.reading.connection(), self.config.source)
        apart.bind(home, key, uid, source)
        stored = checkpoints.load(home, key)
        apart.check_reach(source, stored.pair if stored is not None else None)


def open_databases(config: ProcessorConfig, connections: Path, application_name: str) -> Databases:
    """Make the sessions of one thread; nothing is connected yet."""
    source = ConnectionFiles(connections / SOURCE)
    if not config.is_apart:
        session = Session(source, application_name)
        return Databases(config, session, session)
    return Databases(
        config,
        Session(ConnectionFiles(connections / TARGET), application_name, "the target's database"),
        Session(source, application_name, "the source's database"),
    )
