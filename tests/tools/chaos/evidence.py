"""Collects the evidence of each case: plain SQL, plain clients of the brokers, and the observer's file."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from psycopg import sql

from tests.support.streams import count_written, read_stream
from tests.tools.chaos.cases import CHECKPOINTS, Ending, Target
from tests.tools.chaos.recovery import Seen
from tests.tools.chaos.verdict import Evidence, partition_of
from tests.tools.ledger.account import Handled
from tests.tools.ledger.amqp import format_handler
from tests.tools.ledger.history import Effect, Held, Stored
from tests.tools.ledger.kafka import read_topic
from tests.tools.ledger.targets import read_rows

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.streams import Entry
    from tests.tools.chaos.brokers import Brokers
    from tests.tools.chaos.cases import Case
    from tests.tools.chaos.processes.pods import Pods
    from tests.tools.chaos.servers import Databases

_EFFECTS: Final = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8, partition, epoch, handler, holder,
       message_id
  FROM {} ORDER BY handled_id
"""
_OPEN_CONFLICTS: Final = """
SELECT format('conflict %%s of partition %%s waits for a person: code %%s', id, partition, code)
  FROM outbox.processor_conflicts WHERE processor_id = %s AND needs_person ORDER BY id
"""
_DIVISION: Final = """
SELECT format('it has %%s partitions, and %%s were asked for', partition_count, %s)
  FROM outbox.processor_partitions WHERE processor_id = %s AND (partition_count <> %s OR next_count IS NOT NULL)
"""
_RANGES: Final = """
SELECT partition, lower_snapshot::text, upper_snapshot::text, range_position
  FROM outbox.processor_checkpoints WHERE processor_id = %s
"""
_UNEXAMINED: Final = """
SELECT c.partition, count(*)
  FROM outbox.messages m
  JOIN unnest(%s::int[], %s::text[]::pg_snapshot[], %s::text[]::pg_snapshot[], %s::bigint[])
       AS c (partition, lower, upper, position) ON c.partition = chaos.partition_of(m.partition_key, %s)
 WHERE (pg_visible_in_snapshot(m.transaction_id, c.lower)
        OR pg_visible_in_snapshot(m.transaction_id, c.upper) AND m.position <= c.position) IS NOT TRUE
 GROUP BY c.partition
"""
"""Of the cursor Snapshot: messages that no partition's range holds. Ranges are the source's, wherever they are."""
_IN_QUEUE: Final = """
SELECT 0, count(*)
  FROM (SELECT 1 FROM outbox.competing_batches WHERE processor_id = %(case)s
        UNION ALL
        SELECT 1
          FROM outbox.{} m
          LEFT JOIN LATERAL (
              SELECT f.lower_snapshot FROM outbox.competing_dispatch_positions f
               WHERE f.processor_id = %(case)s AND f.priority = m.priority
               ORDER BY f.id DESC LIMIT 1) AS position ON true
         WHERE m.deliver_after IS NOT NULL
            OR pg_visible_in_snapshot(m.transaction_id, position.lower_snapshot) IS NOT TRUE) AS what_is_left
HAVING count(*) > 0
"""
"""Of a queue: batches in hand, messages that are delayed, and those that were not handed out."""
_HANDLED: Final = "SELECT count(DISTINCT message_id) FROM chaos.{}"


class Journal:
    """What the observer wrote, by case and kind."""

    def __init__(self, path: Path, began: float) -> None:
        """Read it; `began` becomes second 0 of the histories."""
        self.began = began
        self._lines: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                if line.endswith("\n"):
                    entry = json.loads(line)
                    self._lines[entry["case"], entry["kind"]].append(entry)

    def stored(self, case: Case) -> list[Stored]:
        """Return the checkpoints that were seen."""
        return [
            Stored(line["at"] - self.began, line["partition"], tuple(line["place"]))
            for line in self._lines[case.name, "checkpoint"]
        ]

    def held(self, case: Case) -> list[Held]:
        """Return the leases that were seen."""
        return [
            Held(line["at"] - self.began, line["partition"], line["epoch"], f"{line['pod']} ({line['token']})")
            for line in self._lines[case.name, "lease"]
        ]

    def taps(self, case: Case) -> list[Effect]:
        """Return when messages reached the broker."""
        return [self.effect(case, line["at"], line["key"], line["message"]) for line in self._lines[case.name, "tap"]]

    def effect(self, case: Case, at: float, key: str, message: str) -> Effect:
        """Return what a message is that reached a broker; `at` in seconds since 1970."""
        return Effect(at - self.began, partition_of(key, self._count(case, at)), message=message)

    def changes(self, case: Case) -> list[float]:
        """Return when the number of partitions was another one, in seconds since 1970."""
        lines = self._lines[case.name, "partitioning"]
        return [one["at"] for before, one in pairwise(lines) if one["count"] != before["count"]]

    def _count(self, case: Case, at: float) -> int:
        """Return into how many partitions the case was divided at a time."""
        counts = [line["count"] for line in self._lines[case.name, "partitioning"] if line["at"] <= at]
        return counts[-1] if counts else case.partitions


def read_final(databases: Databases, case: Case) -> dict[int, tuple[int, ...]]:
    """Return the checkpoint of each partition."""
    with databases.home(case).connect() as connection:
        rows = connection.execute(CHECKPOINTS).fetchall()
    return {partition: tuple(int(n) for n in numbers) for name, partition, numbers in rows if name == case.name}


def read_unexamined(databases: Databases, case: Case, partitions: int) -> dict[int, int]:
    """Return how many messages no snapshot range holds, or wait in the queue, by partition."""
    if case.queue:
        query = sql.SQL(_IN_QUEUE).format(sql.Identifier(f"queue_{case.queue}"))
        with databases.home(case).connect() as connection:
            return dict(connection.execute(query, {"case": case.name}).fetchall())
    if case.ending is not Ending.SNAPSHOT_RANGE:
        return {}
    with databases.home(case).connect() as home, databases.source.connect() as source:
        ranges = home.execute(_RANGES, [case.name]).fetchall()
        columns = [[each[column] for each in ranges] for column in range(4)]
        return dict(source.execute(_UNEXAMINED, [*columns, partitions]).fetchall())


def count_handled(databases: Databases, case: Case) -> int | None:
    """Return how many messages have an effect, where that can be asked without taking it away."""
    if not case.target.is_database:
        return None
    with databases.home(case).connect() as connection:
        ((count,),) = connection.execute(sql.SQL(_HANDLED).format(sql.Identifier(case.table))).fetchall()
    return int(count)


def read_complaints(databases: Databases, case: Case, partitions: int) -> list[str]:
    """Return what waits for a person, and a change that was not made."""
    with databases.home(case).connect() as connection:
        rows = connection.execute(_OPEN_CONFLICTS, [case.name]).fetchall()
        if case.changes:
            rows += connection.execute(_DIVISION, [partitions, case.name, partitions]).fetchall()
    return [row[0] for row in rows]


def collect(case: Case, databases: Databases, brokers: Brokers, journal: Journal, pods: Pods | None = None) -> Evidence:
    """Read everything that there is about a case, when all is at rest; `pods`: the processes that are its own."""
    partitions = case.partitions if pods is None else pods.partitions
    if case.target.is_database:
        with databases.home(case).connect() as connection:
            handled = read_rows(connection, "chaos", case.table)
            query = sql.SQL(_EFFECTS).format(sql.Identifier("chaos", case.table))
            effects = [Effect(at - journal.began, *rest) for at, *rest in connection.execute(query)]
    else:
        handled, effects = _read_broker(case, brokers, journal)
    return Evidence(
        handled=handled,
        stored=journal.stored(case),
        held=journal.held(case),
        effects=effects,
        final=read_final(databases, case),
        unexamined=read_unexamined(databases, case, partitions),
        partitions=partitions,
        complaints=[*(pods.ended_by_themselves if pods else ()), *read_complaints(databases, case, partitions)],
    )


def _read_broker(case: Case, brokers: Brokers, journal: Journal) -> tuple[list[Handled], list[Effect]]:
    """Return the traces in an exchange's queue, a stream or a topic, and when they came."""
    came: list[tuple[float, Handled]] = []
    if case.target is Target.KAFKA and brokers.kafka is not None:
        came = read_topic(brokers.kafka.servers, case.name)
    elif case.target is Target.STREAM and brokers.rabbitmq is not None:
        count = count_written(brokers.rabbitmq, case.name)
        came = [(entry.at, _as_handled(entry)) for entry in read_stream(brokers.rabbitmq, case.name, count)]
    elif brokers.rabbitmq is not None:
        with brokers.rabbitmq.client() as client:
            return [each.as_handled() for each in client.drain(f"ledger-{case.name}")], journal.taps(case)
    return [handled for _, handled in came], [journal.effect(case, at, one.key, one.message_id) for at, one in came]


def _as_handled(entry: Entry) -> Handled:
    handler = format_handler(entry.headers["x-outbox-pod"], entry.headers["x-outbox-epoch"])
    return Handled.read(entry.message_id, entry.body, handler)


def see(evidence: Evidence, journal: Journal, case: Case) -> Seen:
    """Return when what came."""
    times: dict[int, list[float]] = defaultdict(list)
    messages: dict[str, float] = {}
    for effect in sorted(evidence.effects, key=lambda each: each.at):
        times[effect.partition].append(effect.at + journal.began)
        messages.setdefault(effect.message, effect.at + journal.began)
    return Seen(dict(times), messages, journal.changes(case))
