"""Measure the product's worker beside its peers, print the tables, and write them to docs/performance.

A case is refused when the machine was too busy, unless the run is forced (--force): then the page says so. Exit status,
the highest of all cases: 0 measured and written, 1 refused, 2 a ledger found a fault (the table says in which run), 3 a
case could not be measured. Of a case with 1 or 3 nothing is written.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import traceback
from pathlib import Path

import psycopg

from tests.tools.bench import machine, report
from tests.tools.bench.case import Case, Options
from tests.tools.bench.cases import CASES
from tests.tools.bench.servers import BenchServers
from tests.tools.bench.throughput import say

DOCS = Path(__file__).parents[3] / "docs" / "performance"
REFUSED, FAULTY, BROKEN = 1, 2, 3


def main() -> int:
    """Measure the cases that were asked for."""
    given = _parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that paused programs are ended too
    reasons = machine.decide_start(machine.measure_others())
    if reasons and not given.force:
        return _refuse("Nothing was measured", reasons)
    options = Options(given.seconds, given.runs)
    with tempfile.TemporaryDirectory(prefix="outbox-bench-") as folder:
        servers = BenchServers()
        try:
            statuses = [_run(servers, CASES[name], options, given, Path(folder), reasons) for name in given.cases]
        finally:
            servers.stop()
    return max(statuses)


def _run(
    servers: BenchServers, case: Case, options: Options, given: argparse.Namespace, folder: Path, before: list[str]
) -> int:
    print(f"{case.name}: {case.title}", file=sys.stderr, flush=True)
    own = folder / case.name
    own.mkdir()
    try:
        with servers.place(own, with_kafka="Kafka" in case.servers) as place:
            measured = case.measure(case, place, options)
    except (AssertionError, RuntimeError, OSError, psycopg.Error) as err:
        print(f"{case.name} could not be measured, nothing is written of it: {err}", file=sys.stderr)
        traceback.print_exc()
        return BROKEN
    during = machine.decide_report(measured.others, measured.results, case.figures)
    if during and not given.force:
        return _refuse(f"The figures of {case.name} are not reported", during)
    section = report.build_section(case, measured, servers.versions(), [*before, *during])
    print("\n".join(["", *section, ""]), flush=True)
    for path in report.write(given.to, case, measured, section):
        say(f"written: {path}")
    return FAULTY if any(each.failures() for each in measured.results) else 0


def _refuse(what: str, reasons: list[str]) -> int:
    print(f"{what}, because the figures would mislead:", file=sys.stderr)
    for reason in reasons:
        print(f"- {reason}", file=sys.stderr)
    print("Run it again when the machine does nothing else, or with FORCE=1; the page then says so.", file=sys.stderr)
    return REFUSED


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default=",".join(CASES), help=f"which cases, with commas between: {', '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=10, help="how long a run of the fastest candidate takes")
    parser.add_argument("--runs", type=int, default=5, help="how often each candidate is measured")
    parser.add_argument("--force", action="store_true", help="report on a busy machine too")
    parser.add_argument("--to", type=Path, default=DOCS, help="folder of the page and its charts")
    given = parser.parse_args()
    given.cases = [name.strip() for name in given.case.split(",") if name.strip()]
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"there is no case {', '.join(unknown)}: choose from {', '.join(CASES)}")
    if given.seconds <= 0 or given.runs < 1 or not given.cases:
        parser.error("SECONDS must be above 0, RUNS at least 1, and CASE must name a case")
    return given


if __name__ == "__main__":
    sys.exit(main())
