"""This process as one of the consumers of a processor in mode Competing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError
from outbox_worker.postgres.feeds import competing as calls
from outbox_worker.postgres.ownership import partitions
from outbox_worker.postgres.reading.payloads import PayloadBound

if TYPE_CHECKING:
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

NOTICED_SECONDS: Final = 3.0
"""Until the others have seen a new consumer: each looks every two seconds, in its heartbeat's thread."""


def lease_as_asked(config: ProcessorConfig) -> ProcessorConfig:
    """Let batches in this mode be leased for `competing.leaseDuration`; other modes stay as they are."""
    if config.delivery.competing is None:
        return config
    leased = {"lease_duration": config.delivery.competing.lease_duration}
    return config.model_copy(update={"delivery": config.delivery.model_copy(update=leased)})


class ThisConsumer:
    """Who this process is, what takes batches in its name, and how many consumers the heartbeat last saw.

    The count is replaced whole, so the loop and the heartbeat need no lock.
    """

    def __init__(self, config: ProcessorConfig, key: ProcessorKey, pod: str, pod_uid: str, token: UUID) -> None:
        """Name this process: a pod's uid alone would not tell two processes of one container apart.

        Raises:
            ConfigurationError: the resource does not say how.

        """
        if config.delivery.competing is None:
            raise ConfigurationError("delivery.mode Competing needs delivery.competing")
        self.settings = config.delivery.competing
        self._key = key
        self._token = token
        self.identity = calls.Consumer(f"{pod_uid}/{token}", pod, config.resource.uid, self.settings.lease_duration)
        """How the database names this process."""
        most = config.delivery.batch_limit
        payloads = PayloadBound(config.delivery.byte_limit, most)
        self.taker = calls.BatchTaker(key, self.identity, config.source, self.settings, most, payloads)
        self._count = 1

    def note_count(self, consumers: int) -> None:
        """Take how many live; this one does, also where none was seen."""
        self._count = max(1, consumers)
        self.taker.is_alone = self._count == 1

    def share(self) -> float:
        """Return this consumer's part of the processor's rate: all have equal ones."""
        return 1.0 / self._count

    def renew_membership(self, connection: Connection) -> None:
        """Say that this consumer lives."""
        partitions.renew_membership(
            connection, self._key, claim_uid=self.identity.claim_uid, pod=self.identity.pod, token=self._token,
            lease=self.identity.lease,
        )  # fmt: skip

    def end_membership(self, connection: Connection) -> None:
        """Say that it goes."""
        partitions.end_membership(connection, self._key, self._token)
