"""Counts what one batch of ten messages costs in calls of our own functions: `make follow`.

A real worker handles a short and a long backlog of a real PostgreSQL, and counts its calls meanwhile. The difference of
the two, divided by the batches, is one batch: what the start and the end cost is in both. Only the main thread counts;
the heartbeat's calls depend on time, not on batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.servers.postgres import Servers, free_port, wait_until
from tests.support.worker import SQL_TARGET, Outbox, Workers, build_config

if TYPE_CHECKING:
    from types import FrameType

    from tests.support.servers.postgres import Database

OURS = ("outbox_core", "outbox_worker", "outbox_sql")
BATCH = 10
SHORT, LONG = 20, 120
"""Batches of the two backlogs."""
COUNTS = "OUTBOX_COUNTS"
"""Names the file into which the worker writes its counts."""
CASES: dict[str, dict[str, Any]] = {
    "Ordered, TransactionOrder": {},
    "Ordered, Snapshot": {"source": {"cursor": "Snapshot"}},
    "Partitioned (2)": {"delivery": {"mode": "Partitioned", "partitions": {"count": 2}}},
    "Competing": {"delivery": {"mode": "Competing", "competing": {}}, "source": {"cursor": None}},
}


@dataclass
class Trace:
    """Calls of our own functions in one thread.

    Attributes:
        calls: of each function, named `module:function`.
        switches: calls of a function by one of another module of ours, named `caller -> function`.

    """

    calls: Counter[str]
    switches: Counter[str]

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or (module := _module(frame)) is None:
            return
        self.calls[_name(frame)] += 1
        caller = frame.f_back
        while caller is not None and _module(caller) is None:
            caller = caller.f_back
        if caller is None or _module(caller) != module:
            self.switches[f"{_name(caller)} -> {_name(frame)}"] += 1


def _name(frame: FrameType | None) -> str:
    return "" if frame is None else f"{_module(frame)}:{frame.f_code.co_qualname}"


def _module(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__", "")
    # A comprehension is a part of its function, not a call that a reader follows.
    return name if name.startswith(OURS) and not frame.f_code.co_name.startswith("<") else None


def main() -> int:
    """Print the table, and what each case calls most."""
    servers = Servers()
    try:
        print("| mode, cursor | calls | switches between modules | functions | modules |\n|---|---|---|---|---|")
        traces = {name: _follow(servers, name, case) for name, case in CASES.items()}
    finally:
        servers.stop()
    for name, trace in traces.items():
        print(f"\n{name}: " + ", ".join(f"{function} {count:.1f}" for function, count in trace.calls.most_common(12)))
        for switch in _followed(trace.switches):
            print(f"  {trace.switches[switch]:4.1f} {switch}")
    return 0


def _follow(servers: Servers, name: str, case: dict[str, Any]) -> Trace:
    short, long = (_run(servers, case, batches) for batches in (SHORT, LONG))
    calls, switches = _of_a_batch(short.calls, long.calls), _of_a_batch(short.switches, long.switches)
    functions = _followed(calls)
    modules = {each.partition(":")[0] for each in functions}
    print(f"| {name} | {calls.total():.0f} | {switches.total():.0f} | {len(functions)} | {len(modules)} |", flush=True)
    return Trace(calls, switches)


def _of_a_batch(short: Counter[str], long: Counter[str]) -> Counter[str]:
    return Counter({each: (count - short[each]) / (LONG - SHORT) for each, count in long.items()})


def _followed(counts: Counter[str]) -> list[str]:
    """List what belongs to a batch; what is not called once in every second one belongs to time."""
    return sorted(each for each, count in counts.items() if count >= 0.5)


def _run(servers: Servers, case: dict[str, Any], batches: int) -> Trace:
    with servers.database() as database, tempfile.TemporaryDirectory() as folder:
        delivery = {"batchSize": BATCH} | case.get("delivery", {})
        config = build_config(database, SQL_TARGET, source=case.get("source", {}), delivery=delivery)
        return _handle(database, config, Path(folder), batches * BATCH)


def _handle(database: Database, config: dict[str, Any], folder: Path, count: int) -> Trace:
    outbox = Outbox(database)
    outbox.produce(count)
    home = Workers(folder).prepare(config, database.uri())
    command = [
        sys.executable, "-m", "tests.tools.follow_batch", "--config", str(home / "processor.json"),
        "--connections", str(home / "connections"), "--handler", str(home / "handler"),
        "--termination-log", str(home / "termination-log"), "--port", str(free_port()),
    ]  # fmt: skip
    counts = folder / "counts"
    variables = os.environ | {"POD_NAME": "followed", "POD_UID": "uid-followed", COUNTS: str(counts)}
    with (folder / "log").open("wb") as log, subprocess.Popen(command, env=variables, stderr=log) as worker:
        try:
            wait_until(lambda: outbox.count() >= count, f"{count} messages are handled")
        except AssertionError:
            sys.stderr.write((folder / "log").read_text()[-3000:])
            raise
        finally:
            worker.terminate()
    found = json.loads(counts.read_text())
    return Trace(Counter(found["calls"]), Counter(found["switches"]))


def work(arguments: list[str], counts: Path) -> int:
    """Run a worker that counts its calls, and write them down."""
    from outbox_worker.main import main as run

    trace = Trace(Counter(), Counter())
    sys.setprofile(trace)
    try:
        return run(arguments)
    finally:
        sys.setprofile(None)
        counts.write_text(json.dumps({"calls": trace.calls, "switches": trace.switches}))


if __name__ == "__main__":
    sys.exit(work(sys.argv[1:], Path(os.environ[COUNTS])) if COUNTS in os.environ else main())
