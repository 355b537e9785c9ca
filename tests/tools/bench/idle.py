"""Measures what a candidate costs while no message arrives.

Candidates run one at a time, from start to end, with the product's default lease: a paused one would cost nothing.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from tests.tools.bench.case import Measured
from tests.tools.bench.figures import Figure, Result, Turn
from tests.tools.bench.machine import Load
from tests.tools.bench.processes import cpu_of_tree
from tests.tools.bench.throughput import say
from tests.tools.bench.turns import started

if TYPE_CHECKING:
    from tests.tools.bench.case import Case, Options
    from tests.tools.bench.servers import Place

PROCESS = Figure("process, % of a core", higher_is_better=False, steady=False)
SERVER = Figure("PostgreSQL, % of a core", higher_is_better=False, steady=False)
TRANSACTIONS = Figure("transactions/s", higher_is_better=False, steady=False)
FIGURES = (PROCESS, SERVER, TRANSACTIONS)
_SETTLE = 3.0
_BETWEEN = 0.02
"""Seconds between two commits of the other program: about 50 a second."""
_TRANSACTIONS = "SELECT sum(xact_commit + xact_rollback) FROM pg_stat_database"


def measure(case: Case, place: Place, options: Options) -> Measured:
    """Run each candidate with nothing to do."""
    results = {each.name: Result(each.name, each.ours, each.settings, counted=False) for each in case.candidates()}
    measured = Measured(list(results.values()))
    alone = _measure_server(place, options.seconds)
    for number in range(options.runs):
        for at in range(len(results)):
            _take_turn(case, place, options, (number, at), results, measured, alone)
    measured.notes.append(f"{options.runs} runs of {options.seconds:g} s, one candidate at a time")
    measured.notes.append(
        f"without any candidate PostgreSQL took {alone.values[SERVER.name]:.2f} % of a core and "
        f"{alone.values[TRANSACTIONS.name]:.1f} transactions/s; both are subtracted"
    )
    return measured


def measure_beside_a_writer(case: Case, place: Place, options: Options) -> Measured:
    """Do the same while another program commits all the time, into a table that nothing reads."""
    stopped = threading.Event()
    writer = threading.Thread(target=_write, args=(place, stopped))
    writer.start()
    try:
        return measure(case, place, options)
    finally:
        stopped.set()
        writer.join()


def _write(place: Place, stopped: threading.Event) -> None:
    with place.database.direct() as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS public.others (number bigint)")
        while not stopped.wait(_BETWEEN):
            connection.execute("INSERT INTO public.others VALUES (1)")


def _take_turn(
    case: Case, place: Place, options: Options, turn: tuple[int, int], results: dict[str, Result], measured: Measured,
    alone: Turn,
) -> None:  # fmt: skip
    number, at = turn
    folder = place.folder / f"run-{number}-{at}"
    folder.mkdir()
    only = replace(case, candidates=lambda: [case.candidates()[at]])
    with started(replace(place, folder=folder), only) as turns:
        (candidate,) = turns.candidates
        time.sleep(_SETTLE)
        load, cpu = Load.read(), {name: cpu_of_tree(pid) for name, pid in candidate.pids().items()}
        server = _measure_server(place, options.seconds)
        used = sum(cpu_of_tree(pid) - cpu[name] for name, pid in candidate.pids().items())
        measured.others.append(load.until(Load.read()))
        values = {name: max(0.0, value - alone.values[name]) for name, value in server.values.items()}
        values = {PROCESS.name: used / options.seconds * 100} | values
        result = results[candidate.name]
        result.turns.append(Turn(values))
        result.settings = candidate.settings
        result.peak_mb = max(result.peak_mb, turns.peak_mb(candidate))
    say(f"{candidate.name}: " + ", ".join(f"{name} {value:.2f}" for name, value in values.items()))


def _measure_server(place: Place, seconds: float) -> Turn:
    """Return what PostgreSQL does for so long."""
    connection = place.database.direct()
    pid = place.database.server.pid
    counted = []
    for wait in (seconds, 0):
        row = connection.execute(_TRANSACTIONS).fetchone()
        counted.append((cpu_of_tree(pid), float(row[0]) if row else 0.0))
        time.sleep(wait)
    (cpu, transactions), (later, more) = counted
    return Turn({SERVER.name: (later - cpu) / seconds * 100, TRANSACTIONS.name: (more - transactions) / seconds})
