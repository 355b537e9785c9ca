"""Failing messages beside healthy ones: `python -m tests.tools.load.failing --modes partitioned --orders mixed
--seconds 10`.

Two promises are measured, each against a control without failing messages in the same run, on the same server:

- *stream*: 200 healthy messages a second, and as many that fail, for ever, of keys of their own. Within 5 s (p99) of
  what it would take without them a healthy one is handled, and never is none handled for more than 2 s.
- *backlog*: some thousand messages of which one in a hundred fails. The healthy ones of them are handled at 60 % of the
  rate without them, or more.

`--orders` says how the failing ones arrive: mixed with the healthy ones, or so many in a row. Every message has a key
of its own. Workers are real processes. Exit status 1 unless all promises are kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from tests.support.servers.postgres import Servers, wait_until
from tests.support.worker import PYTHON_TARGET, Workers, build_config

if TYPE_CHECKING:
    from collections.abc import Callable

    import psycopg

    from tests.support.servers.postgres import Database
    from tests.support.worker import Worker

RATE = 200
"""Healthy messages a second."""
LATER = 5.0
"""Seconds by which failing messages may delay healthy ones (p99)."""
GAP = 2.0
"""Seconds without a healthy message handled, at most."""
SHARE = 0.6
"""Of the healthy rate without failing messages, on a backlog."""

SQL = {
    "sql": {
        "statement": "INSERT INTO done (n) SELECT (data->>'n')::int FROM batch "
        "WHERE CASE WHEN data ? 'bad' THEN 1 / (data->>'bad')::int = 0 ELSE true END ORDER BY ordinal"
    }
}
HANDLER = """
def handle(batch, connection):
    for message in batch:
        data = message.json()
        if "bad" in data:
            raise ValueError("this one is bad")
        connection.execute("INSERT INTO done (n) VALUES (%s)", (data["n"],))
"""
TARGETS: dict[str, dict[str, Any]] = {"python": PYTHON_TARGET, "sql": SQL}
MODES: dict[str, dict[str, Any]] = {
    "ordered": {"mode": "Ordered"},
    "partitioned": {"mode": "Partitioned", "partitions": {"count": 8}},
    "competing": {"mode": "Competing", "competing": {}},
}
POLICIES = ("Stop", "DeadLetter", "Skip", "Requeue")
GUARANTEES = ("Transactional", "AtLeastOnce")


@dataclass(frozen=True)
class Case:
    """One way in which messages fail, and the processor that they fail in."""

    mode: str = "partitioned"
    target: str = "python"
    blocks: str = "Key"
    policy: str = "DeadLetter"
    order: str = "mixed"
    guarantee: str = "Transactional"
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """What a person reads."""
        blocks = "" if self.mode == "competing" else f" {self.blocks}"
        return f"{self.mode} {self.target} {self.guarantee}{blocks} {self.policy} {self.order}"

    @property
    def delivery(self) -> dict[str, Any]:
        """The resource's `delivery`; what is not said has the product's defaults."""
        chosen = MODES[self.mode] | {"whenExhausted": self.policy, "guarantee": self.guarantee} | self.settings
        return chosen if self.mode == "competing" else chosen | {"blocks": self.blocks}


def build_cases(asked: argparse.Namespace) -> list[Case]:
    """Return every combination asked for that a resource admits."""
    cases = []
    for mode, target, guarantee, order in product(asked.modes, asked.targets, asked.guarantees, asked.orders):
        competing = mode == "competing"
        # Only consumers requeue, and a message that fails blocks nothing of theirs; a stopped consumer takes no more.
        policies = [each for each in asked.policies if each != ("Stop" if competing else "Requeue")]
        for policy, blocks in product(policies, asked.blocks[:1] if competing else asked.blocks):
            cases.append(Case(mode, target, blocks, policy, order, guarantee))
    return cases


@dataclass(frozen=True)
class Line:
    """What was measured of one run; seconds."""

    healthy: int
    missing: int
    p50: float
    p99: float
    gap: float
    rate: float

    @override
    def __str__(self) -> str:
        return (
            f"{self.healthy} healthy, {self.missing} missing, p50 {self.p50:.3f} s, p99 {self.p99:.3f} s, "
            f"longest gap {self.gap:.2f} s, {self.rate:.0f}/s"
        )


class Run:
    """One database, one worker."""

    def __init__(self, database: Database, directory: Path, case: Case) -> None:
        self.database = database
        self.connection = database.direct()
        self.case = case
        self.workers = Workers(directory)
        self._next = 0
        self.connection.execute("CREATE TABLE done (n int, at timestamptz DEFAULT clock_timestamp())")
        self.connection.execute("CREATE TABLE stored (n int PRIMARY KEY, at timestamptz)")

    def start(self) -> Worker:
        """Start the worker, and wait until it is at work."""
        delivery = {"pollInterval": "500ms", "leaseDuration": "15s", "retry": {}} | self.case.delivery
        config = build_config(
            self.database, TARGETS[self.case.target], delivery=delivery, source={"cursor": None}
        )  # fmt: skip
        config["source"].pop("cursor")
        worker = self.workers.start(config, self.database.uri(), handler=HANDLER)
        worker.wait_for("it is at work", lambda report: report.state == "Active")
        return worker

    def store(self, connection: psycopg.Connection[Any], kinds: str) -> None:
        """Store messages in one transaction: `h` is healthy, `b` is bad."""
        numbers = [*range(self._next, self._next + len(kinds))]
        self._next += len(kinds)
        with connection.transaction():
            connection.execute(
                "INSERT INTO outbox.messages (partition_key, message_id, message_type, data) "
                "SELECT 'key-' || n, 'message-' || n, 'T', CASE WHEN k = 'b' THEN jsonb_build_object('n', n, 'bad', 0) "
                "ELSE jsonb_build_object('n', n) END FROM unnest(%s::int[], %s::text[]) AS r (n, k)",
                (numbers, [*kinds]),
            )
            healthy = [number for number, kind in zip(numbers, kinds, strict=True) if kind == "h"]
            connection.execute("INSERT INTO stored SELECT n, clock_timestamp() FROM unnest(%s::int[]) AS n", (healthy,))

    def stream(self, seconds: float, *, failing: bool) -> Line:
        """Store messages at the rate for so long, then wait until the healthy ones are handled, or long enough."""
        self.start()
        tick = RATE // 20
        row = 0 if self.case.order == "mixed" else int(self.case.order)
        owed = row  # the first row at once
        with self.database.direct() as connection:
            began = time.monotonic()
            for number in range(int(seconds * 20)):
                if failing and row and owed >= row:
                    self.store(connection, "b" * row)
                    owed -= row
                self.store(connection, "h" * tick if row or not failing else "hb" * tick)
                owed += tick
                time.sleep(max(0.0, began + (number + 1) / 20 - time.monotonic()))
        left = "SELECT count(*) FROM stored s WHERE NOT EXISTS (SELECT 1 FROM done d WHERE d.n = s.n)"
        deadline = time.monotonic() + LATER + 10
        while time.monotonic() < deadline and self.connection.execute(left).fetchone() != (0,):
            time.sleep(0.1)
        return self.measure()

    def backlog(self, count: int, *, failing: bool) -> Line:
        """Handle messages that are there before the worker begins, one in a hundred of them bad where `failing`."""
        kinds = ["b" if failing and n % 100 == 50 else "h" for n in range(count)]
        for start in range(0, count, 1000):
            self.store(self.connection, "".join(kinds[start : start + 1000]))
        self.connection.execute("ANALYZE outbox.messages")
        self.start()
        healthy = kinds.count("h")
        wait_until(
            lambda: bool(self.connection.execute("SELECT count(*) >= %s FROM done", (healthy,)).fetchone()[0]),  # type: ignore[index]
            "all healthy ones are handled", 120,
        )  # fmt: skip
        return self.measure()

    def measure(self) -> Line:
        """Read what came of it."""
        self.workers.stop()
        row = self.connection.execute(
            "WITH d AS (SELECT n, min(at) AS at FROM done GROUP BY n), "
            "l AS (SELECT s.n, extract(epoch FROM d.at - s.at) AS late FROM stored s JOIN d USING (n)), "
            "g AS (SELECT extract(epoch FROM at - lag(at) OVER (ORDER BY at)) AS gap FROM d) "
            "SELECT (SELECT count(*) FROM l), (SELECT count(*) FROM stored) - (SELECT count(*) FROM l), "
            "percentile_cont(0.5) WITHIN GROUP (ORDER BY late), percentile_cont(0.99) WITHIN GROUP (ORDER BY late), "
            "(SELECT coalesce(max(gap), 0) FROM g), "
            "(SELECT count(*) / greatest(extract(epoch FROM max(at) - min(at)), 0.001) FROM d), "
            "(SELECT count(*) FROM done) - (SELECT count(*) FROM d) FROM l"
        ).fetchone()
        assert row is not None
        healthy, missing, p50, p99, gap, rate, doubled = row
        assert not doubled, f"{doubled} effects are doubled"
        return Line(healthy, missing, *(float(each or 0) for each in (p50, p99, gap, rate)))


def measure(servers: Servers, case: Case, version: str, act: Callable[[Run, bool], Line]) -> tuple[Line, Line]:
    """Measure a case without failing messages and with them, one after the other: they would share the machine."""
    lines = []
    for failing in (False, True):
        with servers.database(version) as database, tempfile.TemporaryDirectory() as directory:
            run = Run(database, Path(directory), case)
            try:
                lines.append(act(run, failing))
            finally:
                run.workers.stop()
    return lines[0], lines[1]


def find_broken(kind: str, without: Line, beside: Line) -> list[str]:
    """Say which promises were not kept."""
    broken = []
    if beside.missing:
        broken.append(f"{beside.missing} healthy messages were not handled in time")
    if kind == "stream" and beside.p99 - without.p99 > LATER:
        broken.append(f"p99 is {beside.p99 - without.p99:.2f} s later, and {LATER} s are promised")
    if beside.gap - max(0.0, without.gap - 1) > GAP:
        broken.append(f"none was handled for {beside.gap:.2f} s, and {GAP} s are promised")
    if kind == "backlog" and beside.rate < SHARE * without.rate:
        broken.append(
            f"the rate is {beside.rate / without.rate:.0%} of {without.rate:.0f}/s, and {SHARE:.0%} is promised"
        )
    return broken


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("stream", "backlog"), default=["stream", "backlog"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=[*MODES])
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=[*TARGETS])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=[*POLICIES])
    parser.add_argument("--blocks", nargs="+", choices=("Key", "Nothing"), default=["Key", "Nothing"])
    parser.add_argument("--guarantees", nargs="+", choices=GUARANTEES, default=[GUARANTEES[0]])
    parser.add_argument(
        "--orders", nargs="+", default=["mixed", "20", "120", "1000"], help="mixed, or so many in a row"
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stream")
    parser.add_argument("--rows", type=int, default=10_000, help="of each backlog")
    parser.add_argument("--attempts", type=int, help="retry.maxAttempts; absent: the product's default")
    parser.add_argument("--batch", type=int, help="delivery.batchSize; absent: the product's default")
    parser.add_argument("--version", default="18", help="of PostgreSQL")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if a promise was not kept."""
    asked = parse_arguments(arguments)
    settings: dict[str, Any] = {} if asked.batch is None else {"batchSize": asked.batch}
    if asked.attempts is not None:
        settings["retry"] = {"maxAttempts": asked.attempts}
    cases = [replace(case, settings=settings) for case in build_cases(asked)]
    servers, failed = Servers(), 0
    try:
        for kind in asked.kinds:
            # In a backlog one in a hundred is bad, in no order of its own.
            for case in cases if kind == "stream" else dict.fromkeys(replace(each, order="mixed") for each in cases):
                act = (
                    (lambda run, failing: run.stream(asked.seconds, failing=failing)) if kind == "stream"
                    else (lambda run, failing: run.backlog(asked.rows, failing=failing))
                )  # fmt: skip
                without, beside = measure(servers, case, asked.version, act)
                broken = find_broken(kind, without, beside)
                failed += bool(broken)
                print(f"{kind}: {case.name}\n  without: {without}\n  beside:  {beside}", flush=True)
                for each in broken:
                    print(f"  BROKEN: {each}", flush=True)
    finally:
        servers.stop()
    print(f"{failed} cases broke a promise" if failed else "every promise was kept")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
