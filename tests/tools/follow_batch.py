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
        switches: calls of a function by one of another module of ours.

    """

    calls: Counter[str]
    switches: int = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or (module := _module(frame)) is None:
            return
        self.calls[f"{module}:{frame.f_code.co_qualname}"] += 1
        caller = frame.f_back
        while caller is not None and _module(caller) is None:
            caller = caller.f_back
        if caller is None or _module(caller) != module:
            self.switches += 1


def _module(frame: FrameType) -> str | None:
    name = frame.f_globals.get("__name__", "")
    # A comprehension is a part of its function, not a call that a reader follows.
    return name if name.startswith(OURS) and not frame.f_code.co_name.startswith("<") else None


def main() -> int:
    """Print the table, and what each case calls most."""
    servers = Servers()
    try:
        print("| mode, cursor | calls | switches between modules | functions | modules |\n|---|---|---|---|---|")
        most = {name: _follow(servers, name, case) for name, case in CASES.items()}
    finally:
        servers.stop()
    for name, calls in most.items():
        print(f"\n{name}: " + ", ".join(f"{function} {count:.1f}" for function, count in calls.most_common(12)))
    return 0


def _follow(servers: Servers, name: str, case: dict[str, Any]) -> Counter[str]:
    short, long = (_run(servers, case, batches) for batches in (SHORT, LONG))
    batches = LONG - SHORT
    # A function that is not called once in every second batch belongs to time, not to the batch.
    calls = Counter({each: (count - short.calls[each]) / batches for each, count in long.calls.items()})
    followed = {each for each, count in calls.items() if count >= 0.5}
    modules = {each.partition(":")[0] for each in followed}
    switches = (long.switches - short.switches) / batches
    print(f"| {name} | {sum(calls.values()):.0f} | {switches:.0f} | {len(followed)} | {len(modules)} |", flush=True)
    return calls


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
    return Trace(Counter(found["calls"]), found["switches"])


def work(arguments: list[str], counts: Path) -> int:
    """Run a worker that counts its calls, and write them down."""
    from outbox_worker.main import main as run

    trace = Trace(Counter())
    sys.setprofile(trace)
    try:
        return run(arguments)
    finally:
        sys.setprofile(None)
        counts.write_text(json.dumps({"calls": trace.calls, "switches": trace.switches}))


if __name__ == "__main__":
    sys.exit(work(sys.argv[1:], Path(os.environ[COUNTS])) if COUNTS in os.environ else main())
