"""Step 8: the ledger of every processor, its self-test, and what else was measured."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections import Counter
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from tests.tools.demo.place import (
    ANALYTICS,
    BESIDE,
    LOYALTY,
    NAMESPACE,
    PARCELS,
    PROCESSORS,
    PROJECTION,
    QUEUE,
    RABBITMQ,
    SEARCH,
)
from tests.tools.demo.spark import find_driver
from tests.tools.demo.waiting import DemoError, wait_for
from tests.tools.ledger.account import Account, Order, compare, compare_sums
from tests.tools.ledger.amqp import format_handler
from tests.tools.ledger.commitlog import Committed, read_commit_logs
from tests.tools.ledger.plant import check_list, check_sums
from tests.tools.ledger.table import format_accounts, format_table
from tests.tools.ledger.targets import read_parquet, read_rows, read_sums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.tools.demo.scene import Demo
    from tests.tools.demo.scenes.kills import KilledBatch
    from tests.tools.ledger.account import Handled
    from tests.tools.ledger.amqp import Broker

DRAINED_WITHIN: Final = 60.0
PARQUET_PATH: Final = "/var/lib/orders/parquet"


class Books:
    """What was committed, and one account for each target as it is read."""

    def __init__(self, produced: list[Committed], seed: int) -> None:
        """Keep the commit log and a generator for the planted faults."""
        self.produced, self._random = produced, Random(seed)
        self.accounts: list[tuple[Account, bool]] = []
        self.overlooked: list[str] = []
        self.planted = 0

    def add_list(self, name: str, handled: list[Handled], *, exact: bool = True, order: Order = Order.TOTAL) -> Account:
        """Account for a target in which every message stands for itself, and test the ledger on it."""
        account = compare(name, self.produced, handled, order=order)
        self.accounts.append((account, exact))
        self._test(name, check_list(self.produced, handled, self._random, order=order) if handled else ["empty"])
        return account

    def add_sums(self, name: str, sums: dict[object, tuple[int, int]], by: str) -> Account:
        """Account for aggregates."""
        account = compare_sums(name, self.produced, sums, by=by)
        self.accounts.append((account, True))
        self._test(name, check_sums(self.produced, sums, by=by) if sums else ["empty"])
        return account

    def _test(self, name: str, failures: list[str]) -> None:
        self.planted += 1
        self.overlooked += [f"{name}: {failure}" for failure in failures]

    def failures(self) -> list[str]:
        """Everything that speaks against the verdict."""
        wrong = []
        for account, exact in self.accounts:
            if not (account.is_exact() if exact else account.is_at_least_once()):
                wrong += [f"{account.name}: {finding}" for finding in account.findings or ("wrong",)]
        return wrong + [f"self-test of the ledger: {failure}" for failure in self.overlooked]


def wait_until_drained(demo: Demo) -> None:
    """Wait until every processor has examined everything that was committed."""
    for name in (*PROCESSORS, *BESIDE):
        drained = partial(is_drained, demo, name)
        _, seconds = wait_for(f"{name} has examined everything", drained, within=DRAINED_WITHIN)
        demo.progress.say(f"{name} is at the end [{seconds:.1f} s]")


def is_drained(demo: Demo, name: str) -> bool:
    """Whether no committed message lies beyond the checkpoint, or, in other modes than Ordered, is not handled."""
    left = demo.database.unhandled(BESIDE[name]) if name in BESIDE else demo.database.behind(name)
    return left == 0


def take_stock(demo: Demo, log_dir: Path, broker: Broker, killed: list[KilledBatch], seed: int) -> list[str]:
    """Print the ledger; return what is wrong (empty: the verdict is good)."""
    books = Books(read_commit_logs(log_dir), seed)
    with demo.database.connect("demo-ledger") as connection:
        books.add_list(f"{PROJECTION}: messages", read_rows(connection, "projection", "handled_orders"))
        books.add_sums(f"{PROJECTION}: totals", read_sums(connection, "projection", "order_totals", "order_key"), "key")
        books.add_list(f"{LOYALTY}: messages", read_rows(connection, "loyalty", "handled_orders"))
        queue = [delivery.as_handled() for delivery in broker.drain(QUEUE)]
        books.add_list(f"{RABBITMQ}: queue", queue, exact=False)
        minutes = read_sums(connection, "analytics", "orders_per_minute", "minute")
        books.add_sums(f"{ANALYTICS}: per minute", minutes, "minute")
        parcels, search = (read_rows(connection, schema, "handled_orders") for schema in BESIDE.values())
    with parquet_files(demo) as directory:
        rows = read_parquet(directory)
        books.add_list(f"{ANALYTICS}: Parquet", rows, order=Order.NONE)
    books.add_list(f"{PARCELS}, Competing: messages", parcels, order=Order.NONE)
    books.add_list(f"{SEARCH}, Partitioned: messages", search, order=Order.KEY)
    print_ledger(demo, books)
    return books.failures() + explain_duplicates(demo, books, queue, killed)


def print_ledger(demo: Demo, books: Books) -> None:
    """Print the accounts, and that the ledger was tested on them."""
    planted = "one loss, one duplicate, one swap (where there is an order) and one message never committed"
    found = "each was found" if not books.overlooked else "NOT all were found"
    lines = ["", *format_accounts(account for account, _ in books.accounts), ""]
    lines.append(f"The ledger's self-test planted {planted} into a copy of each of {books.planted} targets: {found}.")
    demo.progress.print_lines(lines)


def explain_duplicates(demo: Demo, books: Books, queue: list[Handled], killed: list[KilledBatch]) -> list[str]:
    """Say what the publisher guarantees, and whose each duplicate was; return those that nobody can explain.

    A duplicate is explained when its first copy came from the very process that was killed (pod and epoch, as the
    message's headers say) and lies beyond the checkpoint that this process could not move.
    """
    place = {(m.key, m.sequence): m for m in books.produced}
    dead = {format_handler(batch.pod, batch.epoch): batch for batch in killed}
    first: dict[tuple[str, int], Handled] = {}
    whose: Counter[tuple[str, str]] = Counter()
    unexplained = []
    for trace in queue:
        before = first.setdefault((trace.key, trace.sequence), trace)
        if before is trace:
            continue
        batch, message = dead.get(before.handler), place.get((trace.key, trace.sequence))
        if batch is None or message is None or message.pair <= batch.after or trace.message_id != before.message_id:
            unexplained.append(f"{RABBITMQ}: a duplicate that no kill explains: {before} and {trace}")
            continue
        whose[before.handler, trace.handler] += 1
    lines = [
        f"{RABBITMQ} guarantees AtLeastOnce: {whose.total()} duplicates, each with the message id of its first copy."
    ]
    for (one, other), count in whose.items():
        lines.append(f"    {count}: published by {one}, killed before its checkpoint; again by {other}")
    demo.progress.print_lines(lines)
    return unexplained[:5]


def print_measures(demo: Demo) -> None:
    """Print the figures beside the ledger."""
    demo.progress.print_lines(["", *format_table([("measured", ""), *demo.measured])])


@contextmanager
def parquet_files(demo: Demo) -> Iterator[Path]:
    """Copy the Parquet directory out of the driver's pod.

    Raises:
        DemoError: it cannot be read.

    """
    name = find_driver(demo)["metadata"]["name"]
    command = ["kubectl", "exec", "-n", NAMESPACE, name, "--", "tar", "-cf", "-", "-C", PARQUET_PATH, "."]
    done = subprocess.run(command, env=demo.cluster.environment(), capture_output=True, check=False, timeout=120)
    if done.returncode:
        raise DemoError(f"cannot read {PARQUET_PATH} of {name}: {done.stderr.decode(errors='replace')}")
    with TemporaryDirectory(prefix="outbox-demo-") as directory:
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extractall(directory, filter="data")
        yield Path(directory)
