"""Collects the evidence of each case: plain SQL, a plain AMQP client, and the observer's file."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from psycopg import sql

from tests.chaos.cases import Target
from tests.chaos.verdict import Evidence, partition_of
from tests.ledger.history import Effect, Held, Stored
from tests.ledger.targets import read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.chaos.cases import Case
    from tests.chaos.pods import Pods
    from tests.chaos.servers import Postgres
    from tests.ledger.amqp import Broker

_EFFECTS = """
SELECT extract(epoch FROM pg_xact_commit_timestamp(xmin))::float8, partition, epoch, handler, holder
  FROM {} ORDER BY handled_id
"""
_OPEN_CONFLICTS = """
SELECT format('conflict %%s of partition %%s waits for a person: code %%s', id, partition, code)
  FROM outbox.processor_conflicts WHERE processor_id = %s AND needs_person ORDER BY id
"""


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
        return [
            Effect(line["at"] - self.began, partition_of(line["key"], case.partitions))
            for line in self._lines[case.name, "tap"]
        ]


def read_final(postgres: Postgres, case: Case) -> dict[int, tuple[int, ...]]:
    """Return the checkpoint of each partition."""
    if case.checkpoints is None:
        return {}
    with postgres.connect(case.database) as connection:
        rows = connection.execute(case.checkpoints).fetchall()
    return {partition: tuple(int(n) for n in numbers) for name, partition, numbers in rows if name == case.name}


def collect(case: Case, postgres: Postgres, broker: Broker | None, journal: Journal, pods: Pods) -> Evidence:
    """Read everything that there is about a case, when all is at rest."""
    handled, effects = [], journal.taps(case)
    with postgres.connect(case.database) as connection:
        conflicts = [row[0] for row in connection.execute(_OPEN_CONFLICTS, [case.name])]
        if case.target is not Target.RABBITMQ:
            handled = read_rows(connection, "chaos", case.table)
            query = sql.SQL(_EFFECTS).format(sql.Identifier("chaos", case.table))
            effects = [Effect(at - journal.began, *rest) for at, *rest in connection.execute(query)]
    if broker is not None and case.target is Target.RABBITMQ:
        handled = [delivery.as_handled() for delivery in broker.drain(f"ledger-{case.name}")]
    return Evidence(
        handled=handled,
        stored=journal.stored(case),
        held=journal.held(case),
        effects=effects,
        final=read_final(postgres, case),
        complaints=[*pods.ended_by_themselves, *conflicts],
    )


def effect_times(effects: Sequence[Effect], began: float) -> dict[int, list[float]]:
    """Return the times of effects by partition, ascending, in seconds since 1970."""
    times: dict[int, list[float]] = defaultdict(list)
    for effect in effects:
        times[effect.partition].append(effect.at + began)
    return {partition: sorted(found) for partition, found in times.items()}
