"""Measures whether messages cost more where there is more of something: rows, keys, partitions, bytes.

Each line of a case is one processor in two outboxes, one with little of it and one with much. A processor begins with
the first row, so that all others wait ahead of it; in the middle; or behind the last row, and handles what comes then.
Each is paused but for its turns. What is compared is the processor time of the worker and of PostgreSQL:
how long a disk takes for a commit differs from one second to the next by more than any of this.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.support.servers.postgres import wait_until
from tests.tools.bench import rows
from tests.tools.bench.candidates.worker import OurWorker
from tests.tools.bench.case import Measured
from tests.tools.bench.figures import Figure, Result, Turn
from tests.tools.bench.machine import Load, count_rounds
from tests.tools.bench.throughput import say
from tests.tools.bench.turns import pause, started
from tests.tools.ledger.account import Order, compare

if TYPE_CHECKING:
    import psycopg

    from tests.tools.bench.candidates.targets import Target
    from tests.tools.bench.case import Case, Options
    from tests.tools.bench.servers import Place
    from tests.tools.bench.turns import Turns
    from tests.tools.ledger.account import Handled

_ROWS = 240_000
"""Handled in each run, at least, where messages have the usual size."""
_BYTES = 160_000_000
"""Handled in each run, about, where they have another: several batches, however large they are."""
_NO_AUTOVACUUM = """
DO $$
DECLARE each regclass;
BEGIN
    FOR each IN
        SELECT oid FROM pg_class
        WHERE relkind = 'r' AND relnamespace IN ('outbox'::regnamespace, 'public'::regnamespace)
    LOOP
        EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off, toast.autovacuum_enabled = off)', each);
    END LOOP;
END
$$
"""
"""Tables are vacuumed when rows are inserted: by itself the server would do it in a turn, and often in one of a few."""


def build_figures(little: str, much: str, unit: str = "1,000 messages") -> tuple[Figure, ...]:
    """Return what each run measures: the processor time in both outboxes, and the one divided by the other."""
    times = (Figure(f"CPU ms for {unit}, {each}", higher_is_better=False) for each in (little, much))
    return (*times, Figure("times as much", higher_is_better=False))


class Outbox:
    """A database of its own, with rows of one shape."""

    def __init__(self, size: int = 0, *, keys: int = rows.KEYS, message_bytes: int = rows.BYTES) -> None:
        """Open nothing; `size`: rows that wait ahead of a processor, or stand behind it."""
        self.size = size
        self.keys = keys
        usual = message_bytes == rows.BYTES
        self.run = _ROWS if usual else _BYTES // message_bytes
        """Rows that are handled in a run."""
        self.unit = 1_000 if usual else 1_000_000 / message_bytes
        """Messages of which the processor time is told."""
        self._row = rows.make_row(keys, message_bytes)
        self.stored = 0
        self._opened: tuple[Place, psycopg.Connection[Any]] | None = None

    def open(self, place: Place) -> tuple[Place, psycopg.Connection[Any]]:
        """Make the database; later calls return the same one."""
        if self._opened is None:
            database = place.databases.enter_context(place.servers.database(place.version))
            self._opened = replace(place, database=database), database.direct()
        return self._opened

    def fill(self, count: int) -> None:
        """Commit more rows, until there are so many; all tables are vacuumed then, and at no other time."""
        assert self._opened is not None, "the outbox is not open"
        _, connection = self._opened
        if count > self.stored:
            connection.execute(_NO_AUTOVACUUM)
            say(f"{count - self.stored:,} rows are inserted behind {self.stored:,}")
            rows.insert(connection, self.stored + 1, count, self._row)
            self.stored = count
            connection.execute("VACUUM ANALYZE")


class Grown(OurWorker):
    """Our worker over such an outbox; `behind`: the part of the outbox's rows before which it does not begin."""

    def __init__(
        self, line: str, outbox: Outbox, target: Target, order: Order, *, delivery: dict[str, Any],
        source: dict[str, Any] | None = None, behind: float = 0.0, is_much: bool = False,
    ) -> None:  # fmt: skip
        self.outbox = outbox
        self.first = int(outbox.size * behind) + 1
        self.next = self.first
        """The row that is handled next; those before it were."""
        # Where a processor is to begin behind the last row, no row has the position yet.
        start: dict[str, Any] = {"type": "End"} if behind == 1 else {"type": "Position", "position": self.first}
        super().__init__(
            f"{line}, {'much' if is_much else 'little'}", target, source=source, delivery=delivery, order=order,
            start_from=start if behind else None, baseline=not is_much,
        )  # fmt: skip
        self.line = line

    @override
    def start(self, place: Place) -> None:
        mine, connection = self.outbox.open(place)
        if self.first > 1:
            self.outbox.fill(self.outbox.size)
        super().start(mine)
        pause(connection, [self])

    @override
    def take(self) -> list[Handled]:
        return [rows.handled(int(each.message_id[2:]), self.outbox.keys) for each in super().take()]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: the same processor where there is little and where there is much."""

    little: Grown
    much: Grown


def measure(case: Case, place: Place, options: Options) -> Measured:
    """Handle a few batches of each processor in turn."""
    with started(place, case) as turns:
        grown = [each for each in turns.candidates if isinstance(each, Grown)]
        pairs = {name: [each for each in grown if each.line == name] for name in dict.fromkeys(g.line for g in grown)}
        lines = {Line(*pair): Result(name, ours=False, settings=pair[1].settings) for name, pair in pairs.items()}
        measured = Measured(list(lines.values()))
        _take_round(turns, lines, case)  # warms up
        for _ in count_rounds(options.runs, measured.results, case.figures):
            load = Load.read()
            for line, turn in _take_round(turns, lines, case).items():
                lines[line].turns.append(turn)
            measured.others.append(load.until(Load.read()))
        for line, result in lines.items():
            wrong = "; ".join(filter(None, (_judge(each) for each in (line.little, line.much))))
            result.turns = [replace(turn, failure=wrong) for turn in result.turns]
            result.peak_mb = turns.peak_mb(line.much)
        runs = sorted({f"{each.much.outbox.run:,}" for each in lines}, key=len, reverse=True)
        measured.notes.append(
            f"{len(measured.results[0].turns)} runs of at least {' or '.join(runs)} messages; the memory is the "
            "worker's where there is much; the ledger is read at the end"
        )
        return measured


def _take_round(turns: Turns, lines: dict[Line, Result], case: Case) -> dict[Line, Turn]:
    """Let each processor handle some rows, those where there is little and much one after the other."""
    grown = [each for line in lines for each in (line.little, line.much)]
    for outbox in dict.fromkeys(each.outbox for each in grown):
        handled = max(each.next - each.first for each in grown if each.outbox is outbox)
        outbox.fill(max(outbox.stored, handled + outbox.size) + outbox.run)
    return {line: _take_turn(turns, line, case) for line in lines}


def _take_turn(turns: Turns, line: Line, case: Case) -> Turn:
    little, much = (_spend(turns, each) for each in (line.little, line.much))
    say(f"{line.little.line}: {little:.2f} ms, {much:.2f} ms where there is much")
    return Turn(dict(zip((each.name for each in case.figures), (little, much, much / little), strict=True)), {})


def _spend(turns: Turns, candidate: Grown) -> float:
    """Let it handle some rows; return the milliseconds of processor time for a unit of them."""
    turns.settle()
    before, first = sum(turns.cpu(candidate).values()), candidate.next
    wanted = candidate.next - candidate.first + candidate.outbox.run
    turns.resume([candidate])
    wait_until(lambda: candidate.count() >= wanted, f"{candidate.name} has handled {wanted:,}", 600)
    turns.pause([candidate])
    candidate.next = candidate.first + candidate.count()
    spent = sum(turns.cpu(candidate).values()) - before
    return spent * 1000 / (candidate.next - first) * candidate.outbox.unit


def _judge(candidate: Grown) -> str:
    """Read the target: it must have the first messages; of each key, where each partition goes on by itself."""
    found, keys = candidate.take(), candidate.outbox.keys
    if candidate.order is not Order.KEY:
        return rows.judge(candidate.first, candidate.next - 1, found, candidate.order, keys)
    reached: dict[str, int] = {}
    for each in found:
        reached[each.key] = max(each.sequence, reached.get(each.key, 0))
    last = max((int(each.message_id[2:]) for each in found), default=0)
    wanted = [row for row in rows.committed(candidate.first, last, keys) if row.sequence <= reached.get(row.key, 0)]
    return rows.describe(compare("", wanted, found, order=Order.KEY))
