"""Measures whether a batch takes longer when many rows stand behind the cursor, or wait ahead of it.

Each candidate has a database of its own with so many rows. A batch's time is that between two batches in the target,
where each leaves the moment at which it was stored.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from typing_extensions import override

from tests.support.servers.postgres import wait_until
from tests.tools.bench import rows
from tests.tools.bench.candidates.tables import SqlSums
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Measured
from tests.tools.bench.figures import Figure, Result, Turn
from tests.tools.bench.machine import Load
from tests.tools.bench.throughput import say
from tests.tools.bench.turns import started

if TYPE_CHECKING:
    import psycopg

    from tests.tools.bench.case import Case, Options
    from tests.tools.bench.servers import Place
    from tests.tools.bench.turns import Turns

BATCH = Figure("ms a batch of 1000", higher_is_better=False)
_ROWS = 20_000
"""Handled in each run."""
_TIMES = """
SELECT extract(epoch FROM stored - lag(stored) OVER (ORDER BY batch)) * 1000 FROM {} WHERE batch > %s ORDER BY batch"""


class Grown(OurWorker):
    """Our worker over a database with many rows behind its cursor, or ahead of it."""

    def __init__(self, name: str, *, behind: int = 0, ahead: int = 0, baseline: bool = False) -> None:
        self.sums = SqlSums()
        super().__init__(name, self.sums, baseline=baseline)
        self.behind = behind
        self.ahead = ahead
        self.stored = 0
        """Up to which row its outbox is filled."""
        self.handled = 0

    @override
    def start(self, place: Place) -> None:
        database = place.databases.enter_context(place.servers.database(place.version))
        self._outbox = database.direct()
        super().start(replace(place, database=database))

    @property
    def outbox(self) -> psycopg.Connection[object]:
        return self._outbox

    def fill(self, count: int) -> None:
        """Commit more rows."""
        if count > 0:
            rows.insert(self._outbox, self.stored + 1, self.stored + count)
            self.stored += count


def measure(case: Case, place: Place, options: Options) -> Measured:
    """Fill the outboxes, then handle a few batches of each in turn."""
    with started(place, case) as turns:
        candidates = [each for each in turns.candidates if isinstance(each, Grown)]
        results = {each: Result(each.name, each.ours, each.settings) for each in candidates}
        measured = Measured(list(results.values()))
        turns.pause(candidates)
        for each in candidates:
            each.fill(each.behind)
            _handle(turns, each, each.behind)
        for number in range(options.runs + 1):
            for each in candidates:
                load = Load.read()
                turn = _take_turn(turns, each)
                if number:  # the first warms up
                    measured.others.append(load.until(Load.read()))
                    results[each].turns.append(turn)
        for each, result in results.items():
            wrong = rows.judge(1, each.handled, each.take(), each.order)
            result.turns = [replace(turn, failure=wrong) for turn in result.turns]
            result.peak_mb = turns.peak_mb(each)
        measured.notes.append(
            f"{options.runs} runs of {_ROWS:,} messages; the median of its batches; the ledger is read at the end"
        )
        return measured


def _take_turn(turns: Turns, candidate: Grown) -> Turn:
    """Handle some rows while so many stay ahead."""
    candidate.fill(candidate.handled + candidate.ahead + _ROWS - candidate.stored)
    candidate.outbox.execute("VACUUM ANALYZE outbox.messages")
    before = turns.cpu(candidate)
    first = _last_batch(candidate)
    done = _handle(turns, candidate, _ROWS)
    cpu = {name: (after - before[name]) * 1e6 / done for name, after in turns.cpu(candidate).items()}
    table = candidate.sums.table
    found = candidate.sums.connection.execute(_TIMES.format(table), (first,)).fetchall()
    milliseconds = float(median(row[0] for row in found if row[0] is not None))
    say(f"{candidate.name}: {milliseconds:.2f} ms a batch")
    return Turn({BATCH.name: milliseconds}, cpu)


def _handle(turns: Turns, candidate: Grown, count: int) -> int:
    """Let it handle at least so many, and return how many it did."""
    if not count:
        return 0
    before, wanted = candidate.handled, candidate.handled + count
    turns.resume([candidate])
    wait_until(lambda: candidate.count() >= wanted, f"{candidate.name} has handled {wanted:,}", 600)
    turns.pause([candidate])
    candidate.handled = candidate.count()
    return candidate.handled - before


def _last_batch(candidate: Grown) -> int:
    row = candidate.sums.connection.execute(f"SELECT max(batch) FROM {candidate.sums.table}").fetchone()
    return row[0] or 0 if row else 0
