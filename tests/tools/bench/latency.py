"""Measures the time from the return of a COMMIT to the message's arrival at a consumer of the queue.

One candidate works at a time, the others are paused. Single rows are committed at a fixed rate by one session; a thread
of this process consumes the queue, so both moments are read from one clock.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, LiteralString

from tests.support.servers.postgres import wait_until
from tests.tools.bench import rows
from tests.tools.bench.case import Measured
from tests.tools.bench.figures import Figure, Result, Turn, calculate_percentile
from tests.tools.bench.machine import Load, count_rounds
from tests.tools.bench.throughput import say
from tests.tools.bench.turns import started

if TYPE_CHECKING:
    from tests.tools.bench.candidates.targets import Queue
    from tests.tools.bench.case import Candidate, Case, Options
    from tests.tools.bench.servers import Place
    from tests.tools.bench.turns import Turns
    from tests.tools.ledger.amqp import Delivery

RATES = (100, 1000)
_SHARES = {"p50": 0.5, "p99": 0.99}
FIGURES = tuple(
    Figure(f"{name} ms at {rate}/s", higher_is_better=False, steady=name == "p50") for rate in RATES for name in _SHARES
)
_INSERT: LiteralString = (
    "INSERT INTO outbox.messages (publication_id, partition_key, message_id, message_type, data) "
    "SELECT 'bench', key, id, type, data FROM (SELECT "
    + rows.ROW.replace("%", "%%")
    + " FROM (SELECT %s::bigint AS n) AS given) AS row"
)
_INSERT_AND_NOTIFY: LiteralString = f"WITH row AS ({_INSERT} RETURNING 1) SELECT pg_notify('bench', '') FROM row"
_WARM_UP = 1.0
"""Seconds for which rows are committed before those that count."""


def measure(case: Case, place: Place, options: Options) -> Measured:
    """Measure all candidates at each rate."""
    with started(place, case) as turns:
        latency = Latency(place, turns, options)
        results = {each: Result(each.name, each.ours, each.settings) for each in turns.candidates}
        measured = Measured(list(results.values()))
        turns.pause(turns.candidates)
        for number in count_rounds(options.runs, measured.results, FIGURES):
            shift = number % len(turns.candidates)
            for each in [*turns.candidates[shift:], *turns.candidates[:shift]]:
                load = Load.read()
                results[each].turns.append(latency.take_turn(each))
                measured.others.append(load.until(Load.read()))
        for each, result in results.items():
            result.peak_mb = turns.peak_mb(each)
        measured.notes.append(f"{len(measured.results[0].turns)} runs, {options.seconds:g} s at each rate")
        measured.notes.append("single rows are committed by one session; the time begins when its COMMIT has returned")
        return measured


class Latency:
    """One producer, and a consumer of each queue in its turn."""

    def __init__(self, place: Place, turns: Turns, options: Options) -> None:
        self._place = place
        self._turns = turns
        self._options = options
        self._connection = place.database.direct()
        self._last = 0
        self._taken = dict.fromkeys(turns.candidates, 0)
        """Up to which row each queue was read."""
        self._wrong = dict.fromkeys(turns.candidates, "")
        """What the ledger found wrong with rows of other candidates' turns."""

    def take_turn(self, candidate: Candidate) -> Turn:
        """Let all catch up, then measure one candidate at each rate."""
        queue = candidate.queue
        assert queue is not None, f"{candidate.name} has no queue"
        self._catch_up()
        self._turns.resume([candidate])
        failure, self._wrong[candidate] = self._wrong[candidate], ""
        values: dict[str, float] = {}
        cpu: dict[str, float] = {}
        for rate in RATES:
            self._commit_and_consume(candidate, queue, rate, _WARM_UP)
            before, first = self._turns.cpu(candidate), self._last + 1
            delays, wrong = self._commit_and_consume(candidate, queue, rate, self._options.seconds)
            count = self._last - first + 1
            cpu = {name: (after - before[name]) * 1e6 / count for name, after in self._turns.cpu(candidate).items()}
            failure = failure or wrong
            for name, share in _SHARES.items():
                values[f"{name} ms at {rate}/s"] = calculate_percentile(delays, share) * 1000 if delays else 0.0
        self._taken[candidate] = self._last
        self._turns.pause([candidate])
        say(f"{candidate.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()))
        return Turn(values, cpu, failure)

    def _catch_up(self) -> None:
        """Let every candidate publish what came in the last turn: none is paused until its connections are dead."""
        self._turns.resume(self._turns.candidates)
        for each, taken in self._taken.items():
            has_caught_up = partial(_has, each, self._last - taken)
            wait_until(has_caught_up, f"{each.name} has caught up", 120)
            self._wrong[each] = self._wrong[each] or rows.judge(taken + 1, self._last, each.take(), each.order)
            self._taken[each] = self._last
        self._turns.pause(self._turns.candidates)

    def _commit_and_consume(
        self, candidate: Candidate, queue: Queue, rate: int, seconds: float
    ) -> tuple[list[float], str]:
        """Commit rows at a rate; return how long each took, and what the ledger found wrong."""
        first, count = self._last + 1, max(1, int(rate * seconds))
        self._last += count
        arrived: list[tuple[float, Delivery]] = []
        ready = threading.Event()
        consumer = threading.Thread(target=self._consume, args=(queue, count, arrived, ready))
        consumer.start()
        ready.wait(10)
        committed = self._commit(first, count, rate, _INSERT_AND_NOTIFY if candidate.notified else _INSERT)
        consumer.join()
        found = [(at, queue.read(delivery)) for at, delivery in arrived]
        delays = [
            at - committed[n] for at, trace in found if (n := int(trace.message_id.partition("-")[2])) in committed
        ]
        return delays, rows.judge(first, self._last, [trace for _, trace in found], candidate.order)

    def _consume(self, queue: Queue, count: int, arrived: list[tuple[float, Delivery]], ready: threading.Event) -> None:
        """Note what comes, and when; what has not come when the client's patience ends is lost."""
        with self._place.broker.client() as client, suppress(OSError):
            deliveries = client.consume(queue.name)
            ready.set()
            for delivery in deliveries:
                arrived.append((time.monotonic(), delivery))
                if len(arrived) == count:
                    return

    def _commit(self, first: int, count: int, rate: int, statement: LiteralString) -> dict[int, float]:
        """Commit one row after the other; return when each COMMIT had returned."""
        returned: dict[int, float] = {}
        began = time.monotonic()
        for number in range(count):
            wait = began + number / rate - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            self._connection.execute(statement, (first + number,), prepare=True)
            returned[first + number] = time.monotonic()
        return returned


def _has(candidate: Candidate, count: int) -> bool:
    return candidate.count() >= count
