"""A process's last word in the database: said with each heartbeat, soon when the state changes, and at the end.

It is for people, and never costs a lease: in a statement of its own, after all else, and for a little time only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_core.errors import OutboxError
from outbox_worker.logs import get_logger
from outbox_worker.postgres.connection import limited
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.ownership import words
from outbox_worker.postgres.ownership.words import Saying

if TYPE_CHECKING:
    from datetime import timedelta
    from uuid import UUID

    from outbox_worker.observe.status import ProcessStatus
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey

_log = get_logger("outbox.worker")
_SHARE: Final = 0.1
"""Of the lease; a third of it lies between two heartbeats."""
_LONGEST: Final = 1.0
"""Seconds."""


class Speaker:
    """Knows what the process has to say, and what of that it has said."""

    def __init__(self, status: ProcessStatus, *, claim_uid: str, pod: str, token: UUID) -> None:
        self._status = status
        self._claim_uid = claim_uid
        self._pod = pod
        self._token = token
        self._said: tuple[words.Word, ...] = ()
        self._failing = False

    @property
    def has_news(self) -> bool:
        """The state of some partition is another one than was said: the next heartbeat need not be waited for."""
        return _states(self._status.words) != _states(self._said)

    def say(self, connection: Connection, key: ProcessorKey, lease: timedelta, *, ended: bool = False) -> None:
        """Say it, if there is anything to say; what cannot be said is said again with the next heartbeat."""
        self._said = self._status.words
        if not self._said:
            return
        saying = Saying(self._claim_uid, self._pod, words.format_words(self._said))
        try:
            with limited(connection, min(_LONGEST, lease.total_seconds() * _SHARE)):
                words.say(connection, key, saying, token=self._token, lease=lease, ended=ended)
            self._failing = False
        except (OutboxError, DatabaseError) as err:
            if not self._failing:
                _log.warning("no word could be left in the database", extra={"error": str(err)})
            self._failing = True


def _states(said: tuple[words.Word, ...]) -> set[tuple[int, str]]:
    return {(each.partition, each.state) for each in said}
