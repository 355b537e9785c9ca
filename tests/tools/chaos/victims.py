"""Who is struck: a living process by the schedule's share, what it owns, and what it has in hand."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import psycopg
from psycopg import sql

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.tools.chaos.cases import Case
    from tests.tools.chaos.processes.pods import Pod, Pods
    from tests.tools.chaos.schedule import Fault
    from tests.tools.chaos.servers import Databases

OWNERS_SHARE: Final = 0.75
"""Of the blows at one process, how many are at an owner."""
_OWNED: Final = """
SELECT pod, partition FROM outbox.processor_leases
 WHERE processor_id = %(case)s AND token IS NOT NULL AND expires_at > clock_timestamp()
UNION
SELECT pod, 0 FROM outbox.competing_batches
 WHERE processor_id = %(case)s AND owner IS NOT NULL AND expires_at > clock_timestamp()
"""
_IN_HAND: Final = """
SELECT m.message_id::text
  FROM outbox.competing_batches b
  JOIN outbox.{} m
    ON (m.transaction_id, m.position) > (b.after_transaction_id, b.after_position)
   AND (m.transaction_id, m.position) <= (b.upto_transaction_id, b.upto_position)
   AND (b.positions IS NULL OR m.position = ANY (b.positions))
   AND (b.upper_snapshot IS NULL OR pg_visible_in_snapshot(m.transaction_id, b.upper_snapshot))
   AND (b.lower_snapshot IS NULL OR NOT pg_visible_in_snapshot(m.transaction_id, b.lower_snapshot))
 WHERE b.processor_id = %s AND b.pod = %s
"""
"""What a consumer took and has not finished, in mode Competing."""


@dataclass
class Victim:
    """A process that is struck, the partitions that it owns and, in mode Competing, the messages that it has taken."""

    pod: Pod
    partitions: tuple[int, ...]
    messages: tuple[str, ...] = ()


class Victims:
    """All processes of all cases."""

    def __init__(self, databases: Databases, pods: Mapping[str, Pods]) -> None:
        """Keep where to look."""
        self._databases, self._pods = databases, pods

    def choose(self, fault: Fault, *, owner: bool = False) -> Pod | None:
        """Pick a living process by the schedule's share."""
        owned = self._owned(self._pods[fault.case].case)
        alive = self._pods[fault.case].alive()
        owners = [pod for pod in alive if pod.name in owned]
        among = owners if owners and (owner or fault.choice < OWNERS_SHARE) else alive
        return among[int(fault.choice * 997) % len(among)] if among else None

    def look_at(self, case: Case, pod: Pod) -> Victim:
        """Say what a process owns, and what it has in hand; nothing, if the database cannot be asked."""
        victim = Victim(pod, self._owned(case).get(pod.name, ()))
        if not case.fenced:
            with contextlib.suppress(psycopg.Error), self._databases.home(case).connect() as connection:
                table = sql.Identifier(f"queue_{case.queue}" if case.queue else "messages")
                rows = connection.execute(sql.SQL(_IN_HAND).format(table), [case.name, pod.name])
                victim.messages = tuple(row[0] for row in rows)
        return victim

    def _owned(self, case: Case) -> dict[str, tuple[int, ...]]:
        try:
            return self.ask_owned(case)
        except psycopg.Error:
            return {}

    def ask_owned(self, case: Case) -> dict[str, tuple[int, ...]]:
        owned: dict[str, tuple[int, ...]] = {}
        with self._databases.home(case).connect() as connection:
            for pod, partition in connection.execute(_OWNED, {"case": case.name}):
                owned[pod] = (*owned.get(pod, ()), partition)
        return owned
