"""Measures how fast a backlog is handled.

In each run the same rows are committed while every candidate is paused; then one candidate after the other handles all
of them, in another order each run, and the ledger reads the targets. Two runs warm up and are not reported: a small
one, and one of about the size of the others, for programs that are compiled while they work. They also say how many
rows are enough for the seconds that were asked for.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.tools.bench import rows
from tests.tools.bench.case import Measured
from tests.tools.bench.figures import Figure, Result, Turn
from tests.tools.bench.machine import Load, count_rounds
from tests.tools.bench.servers import HEARTBEAT
from tests.tools.bench.turns import SETTLED, started

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.tools.bench.case import Candidate, Case, Options
    from tests.tools.bench.servers import Place
    from tests.tools.bench.turns import Turns

RATE = Figure("messages/s")
WARM_UP = 20_000
"""Rows of the first run; a candidate with rows of its own gets fewer."""
WARM_UP_COPIES = 1_000
MOST = 600_000
"""Rows of a run, so that the ledger of all candidates is made in seconds."""
INSERTED = 25_000
"""Rows that are committed in a second, at least."""
POLL = 0.02
PATIENCE = 60.0
"""Seconds beside the time that a candidate should take, after which a run has failed."""


def measure(case: Case, place: Place, options: Options) -> Measured:
    """Measure all candidates of a case."""
    with started(place, case) as turns:
        return Throughput(place, turns, options).measure()


class Throughput:
    """The runs of one case."""

    def __init__(self, place: Place, turns: Turns, options: Options) -> None:
        self._connection = place.database.direct()
        self._turns = turns
        self._options = options
        self._last = 0
        """The last row of the outbox."""
        self._results = {each: Result(each.name, each.ours, each.settings) for each in turns.candidates}
        self._measured = Measured(list(self._results.values()))
        self._rates: dict[Candidate, float] = {}

    def measure(self) -> Measured:
        """Warm up twice, then run as often as asked."""
        self._run(WARM_UP, {each: min(WARM_UP, WARM_UP_COPIES) for each in self._own_rows()})
        self._run(*self._plan())
        count, own = self._plan()
        for number in count_rounds(self._options.runs, self._measured.results, [RATE]):
            self._run(count, own, turned=number)
        for each, result in self._results.items():
            result.peak_mb = self._turns.peak_mb(each)
        self._measured.notes += [f"{len(self._measured.results[0].turns)} runs of {count:,} messages"]
        self._measured.notes += [
            f"{each.name}: {fewer:,} messages, in a table of its own" for each, fewer in own.items() if fewer < count
        ]
        return self._measured

    def _plan(self) -> tuple[int, dict[Candidate, int]]:
        """Forget the last run, which warmed up; return how many rows take so long as was asked."""
        for each, result in self._results.items():
            if failures := result.failures():
                raise AssertionError(f"{each.name} failed while it warmed up: {failures[0]}")
            self._rates[each] = result.numbers(RATE.name)[0]
            result.turns.clear()
        self._measured.others.clear()
        readers = [rate for each, rate in self._rates.items() if not each.copies]
        own = {each: self._rates[each] for each in self._own_rows()}
        seconds = self._options.seconds
        if any(each.queue is not None for each in self._rates):
            seconds = limit_seconds(seconds, readers, list(own.values()))
        count = _round(max(readers) * seconds)
        return count, {each: min(count, _round(rate * seconds)) for each, rate in own.items()}

    def _own_rows(self) -> list[Candidate]:
        return [each for each in self._turns.candidates if each.copies]

    def _run(self, count: int, own: dict[Candidate, int], *, turned: int = 0) -> None:
        """Commit rows, let each candidate handle them, and judge the targets."""
        candidates = list(self._turns.candidates)
        turned %= len(candidates)
        candidates = candidates[turned:] + candidates[:turned]
        self._turns.pause(candidates)
        first = self._last + 1
        self._last += count
        rows.insert(self._connection, first, self._last)
        for each, fewer in own.items():
            each.add(first, first + fewer - 1)
        self._connection.execute("VACUUM ANALYZE outbox.messages")
        self._connection.execute("CHECKPOINT")
        turns = [(each, self._take_turn(each, own.get(each, count))) for each in candidates]
        for each, turn in turns:
            wrong = rows.judge(first, first + own.get(each, count) - 1, each.take(), each.order)
            self._results[each].turns.append(Turn(turn.values, turn.cpu, turn.failure or wrong))
        self._turns.resume(candidates)

    def _take_turn(self, candidate: Candidate, count: int) -> Turn:
        limit = PATIENCE + 10 * (count / rate if (rate := self._rates.get(candidate)) else 0)
        self._turns.settle()
        load, cpu = Load.read(), self._turns.cpu(candidate)
        began = time.monotonic()
        self._turns.resume([candidate])
        seen = 0
        while (seen := candidate.count()) < count and time.monotonic() - began < limit:
            time.sleep(POLL)
        took = time.monotonic() - began
        time.sleep(0.3)  # its checkpoint, and what it writes when there is nothing more
        used = {name: (after - cpu[name]) * 1e6 / count for name, after in self._turns.cpu(candidate).items()}
        self._measured.others.append(load.until(Load.read()))
        with suppress(AssertionError):  # one that never rests is said by its figures
            self._turns.pause([candidate])
        say(f"{candidate.name}: {seen:,} in {took:.2f} s, {count / took:,.0f} messages/s")
        if seen < count:
            return Turn({}, used, f"{seen:,} of {count:,} were handled in {limit:.0f} s")
        return Turn({RATE.name: count / took}, used)


def limit_seconds(seconds: float, readers: Sequence[float], copies: Sequence[float]) -> float:
    """Return how long the fastest reader may take, so that RabbitMQ ends no connection of a paused program.

    Readers, by their rates, all handle what the fastest handles in that time; those with copies of their own handle as
    much as they can in it. The rows of all are inserted before.
    """
    together = max(readers) * (sum(1 / rate for rate in readers) + 1 / INSERTED)
    together += sum(1 + rate / INSERTED for rate in copies)
    return min(seconds, (HEARTBEAT * 0.75 - SETTLED * (len(readers) + len(copies))) / together)


def say(text: str) -> None:
    """Tell a person how far it is."""
    print(f"  {text}", file=sys.stderr, flush=True)


def _round(count: float) -> int:
    """Whole transactions of rows, within reason."""
    return max(rows.PER_TRANSACTION, min(MOST, int(count) // rows.PER_TRANSACTION * rows.PER_TRANSACTION))
