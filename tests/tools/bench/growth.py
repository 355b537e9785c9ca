"""Measures whether a batch takes longer when many rows stand behind the cursor, or wait ahead of it.

There are two databases, one with few rows and one with many. In each, every mode has a processor that begins with the
first row, so that all others wait ahead of it, and one that begins behind the last, and handles what comes then. Each
is paused while it has nothing to do: the former before there are rows, the latter behind them. A batch's time is that
between two batches in the target, where each leaves the moment at which it was stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.support.servers.postgres import wait_until
from tests.tools.bench import rows
from tests.tools.bench.candidates.tables import SqlSums
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Measured
from tests.tools.bench.figures import Figure, Result, Turn
from tests.tools.bench.machine import Load, count_rounds
from tests.tools.bench.throughput import say
from tests.tools.bench.turns import pause, started
from tests.tools.ledger.account import Order, compare

if TYPE_CHECKING:
    import psycopg

    from tests.tools.bench.case import Case, Options
    from tests.tools.bench.servers import Place
    from tests.tools.bench.turns import Turns

FEW, MANY = 10_000, 10_000_000
FIGURES = (
    Figure(f"ms a batch, {FEW:,} rows", higher_is_better=False),
    Figure(f"ms a batch, {MANY:,} rows", higher_is_better=False),
    Figure("times as long", higher_is_better=False),
)
_ROWS = 20_000
"""Handled in each run, at least."""
_TIMES = """
SELECT extract(epoch FROM stored - lag(stored) OVER (ORDER BY batch)) * 1000 FROM {} WHERE batch > %s ORDER BY batch"""


class Outbox:
    """A database with rows, and how many it has."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.stored = 0
        self._opened: tuple[Place, psycopg.Connection[Any]] | None = None

    def open(self, place: Place) -> tuple[Place, psycopg.Connection[Any]]:
        """Make the database; later calls return the same one."""
        if self._opened is None:
            database = place.databases.enter_context(place.servers.database(place.version))
            self._opened = replace(place, database=database), database.direct()
        return self._opened

    def fill(self, count: int) -> None:
        """Commit more rows, until there are so many."""
        assert self._opened is not None, "the outbox is not open"
        _, connection = self._opened
        if count > self.stored:
            say(f"{count - self.stored:,} rows are inserted behind {self.stored:,}")
            rows.insert(connection, self.stored + 1, count)
            self.stored = count
            connection.execute("VACUUM ANALYZE outbox.messages")


class Grown(OurWorker):
    """Our worker over such a database, from its first row or from behind its last one."""

    def __init__(
        self, line: str, outbox: Outbox, order: Order, source: dict[str, Any], delivery: dict[str, Any], *, behind: bool
    ) -> None:
        self.sums = SqlSums()
        super().__init__(
            f"{line}, {outbox.size:,} rows", self.sums, source=source, delivery=delivery, order=order,
            start_from="End" if behind else "Beginning", baseline=outbox.size == FEW,
        )  # fmt: skip
        self.line = line
        self.outbox = outbox
        self.first = outbox.size + 1 if behind else 1
        self.next = self.first
        """The row that is handled next; those before it were."""

    @override
    def start(self, place: Place) -> None:
        mine, connection = self.outbox.open(place)
        if self.first > 1:
            self.outbox.fill(self.outbox.size)
        super().start(mine)
        pause(connection, [self])


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: the same processor over few rows and over many."""

    few: Grown
    many: Grown


def measure(case: Case, place: Place, options: Options) -> Measured:
    """Handle a few batches of each processor in turn."""
    with started(place, case) as turns:
        grown = [each for each in turns.candidates if isinstance(each, Grown)]
        pairs = {name: [each for each in grown if each.line == name] for name in dict.fromkeys(g.line for g in grown)}
        lines = {Line(*pair): Result(name, ours=False, settings=pair[0].settings) for name, pair in pairs.items()}
        measured = Measured(list(lines.values()))
        _take_round(turns, lines)  # warms up
        for _ in count_rounds(options.runs, measured.results, case.figures):
            load = Load.read()
            for line, turn in _take_round(turns, lines).items():
                lines[line].turns.append(turn)
            measured.others.append(load.until(Load.read()))
        for line, result in lines.items():
            wrong = "; ".join(filter(None, (_judge(each) for each in (line.few, line.many))))
            result.turns = [replace(turn, failure=wrong) for turn in result.turns]
            result.peak_mb = turns.peak_mb(line.many)
        measured.notes.append(
            f"{len(measured.results[0].turns)} runs of {_ROWS:,} messages each; the median of its batches; the ledger "
            "is read at the end"
        )
        return measured


def _take_round(turns: Turns, lines: dict[Line, Result]) -> dict[Line, Turn]:
    """Let each processor handle some rows, those over few and over many one after the other."""
    for outbox in dict.fromkeys(each.outbox for line in lines for each in (line.few, line.many)):
        ahead = max(
            each.next for line in lines for each in (line.few, line.many) if each.outbox is outbox and each.first == 1
        )
        outbox.fill(max(outbox.stored, ahead + outbox.size) + _ROWS)
    return {line: _take_turn(turns, line) for line in lines}


def _take_turn(turns: Turns, line: Line) -> Turn:
    (few, _), (many, cpu) = (_time_batches(turns, each) for each in (line.few, line.many))
    say(f"{line.few.line}: {few:.2f} ms a batch, {many:.2f} ms where there are many rows")
    return Turn(dict(zip((each.name for each in FIGURES), (few, many, many / few), strict=True)), cpu)


def _time_batches(turns: Turns, candidate: Grown) -> tuple[float, dict[str, float]]:
    """Let it handle some rows; return the milliseconds of a batch, and the CPU microseconds of a message."""
    before, first, batch = turns.cpu(candidate), candidate.next, _last_batch(candidate)
    wanted = candidate.next - candidate.first + _ROWS
    turns.resume([candidate])
    wait_until(lambda: candidate.count() >= wanted, f"{candidate.name} has handled {wanted:,}", 600)
    turns.pause([candidate])
    candidate.next = candidate.first + candidate.count()
    done = candidate.next - first
    cpu = {name: (after - before[name]) * 1e6 / done for name, after in turns.cpu(candidate).items()}
    found = candidate.sums.connection.execute(_TIMES.format(candidate.sums.table), (batch,)).fetchall()
    return float(median(row[0] for row in found if row[0] is not None)), cpu


def _judge(candidate: Grown) -> str:
    """Read the target: it must have the first messages; of each key, where each partition goes on by itself."""
    found = list(candidate.take())
    if candidate.order is not Order.KEY:
        return rows.judge(candidate.first, candidate.next - 1, found, candidate.order)
    reached: dict[str, int] = {}
    for each in found:
        reached[each.key] = max(each.sequence, reached.get(each.key, 0))
    last = max((int(each.message_id[2:]) for each in found), default=0)
    wanted = [row for row in rows.committed(candidate.first, last) if row.sequence <= reached.get(row.key, 0)]
    return rows.describe(compare("", wanted, found, order=Order.KEY))


def _last_batch(candidate: Grown) -> int:
    row = candidate.sums.connection.execute(f"SELECT max(batch) FROM {candidate.sums.table}").fetchone()
    return row[0] or 0 if row else 0
