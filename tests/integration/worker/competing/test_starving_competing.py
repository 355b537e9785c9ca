"""Failing messages beside healthy ones in mode Competing: the healthy ones are handled meanwhile. Real processes."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from tests.support.failing import Failing
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, build_config

pytestmark = pytest.mark.calm

STORE = {
    None: "INSERT INTO outbox.messages (partition_key, message_id, message_type, data, scheduled) ",
    "jobs": "INSERT INTO outbox.queue_jobs (partition_key, message_id, message_type, data, scheduled) ",
}
ROWS = (
    "SELECT 'key-' || n, 'message-' || n, 'Numbered', jsonb_build_object('total', n), clock_timestamp() "
    "FROM unnest(%s::int[]) AS n"
)


class Feed:
    """Stores messages at a pace, healthy ones and ones that always fail, each with a key of its own."""

    def __init__(self, failing, queue=None):
        self._failing = failing
        self._store = STORE[queue] + ROWS
        self._last = 0
        self.healthy = []
        failing.connection.execute("ALTER TABLE handled ADD COLUMN at timestamptz DEFAULT clock_timestamp()")
        if queue is not None:
            failing.connection.execute("SELECT outbox.create_queue(%s)", (queue,))

    def store(self, kinds):
        """Each letter is a message: `b` fails."""
        connection = self._failing.connection
        numbers = list(range(self._last, self._last + len(kinds)))
        self._last += len(kinds)
        bad = [f"message-{n}" for n, kind in zip(numbers, kinds, strict=True) if kind == "b"]
        with connection.transaction():
            connection.execute("INSERT INTO bad SELECT unnest(%s::text[])", (bad,))
            connection.execute(self._store, (numbers,))
        self.healthy += [n for n, kind in zip(numbers, kinds, strict=True) if kind != "b"]

    def run(self, kinds, seconds):
        """Store these ten times a second."""
        begun = time.monotonic()
        for tick in range(int(seconds * 10)):
            self.store(kinds)
            threading.Event().wait(max(0.0, begun + (tick + 1) / 10 - time.monotonic()))

    def assert_handled(self, queue=None):
        """All healthy ones once; 99 of 100 within 5 s; never none for 2 s."""
        wait_until(lambda: len(self._failing.handled()) >= len(self.healthy), "all healthy ones are handled", 20)
        assert sorted(self._failing.handled()) == self.healthy
        table = "messages" if queue is None else f"queue_{queue}"
        rows = self._failing.connection.execute(
            f"SELECT extract(epoch FROM h.at)::float8, extract(epoch FROM h.at - m.scheduled)::float8 "
            f"FROM handled h JOIN outbox.{table} m USING (message_id) ORDER BY h.at"
        ).fetchall()
        times, waits = [row[0] for row in rows], sorted(row[1] for row in rows)
        assert waits[int(len(waits) * 0.99)] < 5.0, waits[-20:]
        gaps = [later - before for before, later in itertools.pairwise(times)]
        assert max(gaps) < 2.0, sorted(gaps)[-5:]


@pytest.fixture
def failing(outbox):
    return Failing(outbox)


def start(failing, workers, pod, target, queue, **delivery):
    over = {"leaseDuration": "2s"} | ({"queue": queue} if queue else {})
    delivery = {"mode": "Competing", "competing": over, "batchSize": 1000, "leaseDuration": "15s"} | delivery
    config = build_config(failing.outbox.database, target, delivery=delivery)
    worker = workers.start(config, failing.outbox.database.uri(), handler=PYTHON_HANDLER, pod=pod)
    worker.wait_state("Active")


@pytest.mark.parametrize(
    ("row", "policy", "target", "queue", "pods"),
    [
        pytest.param(20, "Stop", SQL_TARGET, None, "a", id="20-Stop-sql", marks=pytest.mark.nightly),
        pytest.param(30, "DeadLetter", PYTHON_TARGET, "jobs", "ab", id="30-DeadLetter-python-queue-two"),
        pytest.param(120, "Requeue", SQL_TARGET, "jobs", "a", id="120-Requeue-sql-queue", marks=pytest.mark.nightly),
        pytest.param(120, "Requeue", PYTHON_TARGET, None, "ab", id="120-Requeue-python-two"),
        pytest.param(1000, "Skip", SQL_TARGET, None, "a", id="1000-Skip-sql"),
    ],
)
def test_starve_no_healthy_message_behind_many_in_a_row_that_fail(failing, workers, row, policy, target, queue, pods):
    """They are tried again for as long as it takes, at once or after a second, and what comes after them is handled."""
    feed = Feed(failing, queue)
    retry = {"maxAttempts": 1 if policy in ("DeadLetter", "Skip") else 100 if policy == "Stop" else 2,
             "initialBackoff": "100ms", "maxBackoff": "1s"}  # fmt: skip
    for pod in pods:
        start(failing, workers, pod, target, queue, whenExhausted=policy, retry=retry)
    feed.store("b" * row)
    feed.run("g", 8)
    feed.assert_handled(queue)


@pytest.mark.parametrize(
    ("target", "queue"),
    [
        pytest.param(SQL_TARGET, None, id="outbox-sql"),
        pytest.param(PYTHON_TARGET, None, id="outbox-python", marks=pytest.mark.nightly),
        pytest.param(SQL_TARGET, "jobs", id="queue-sql", marks=pytest.mark.nightly),
        pytest.param(PYTHON_TARGET, "jobs", id="queue-python"),
    ],
)
def test_starve_no_healthy_message_where_every_other_one_fails(failing, workers, target, queue):
    feed = Feed(failing, queue)
    retry = {"maxAttempts": 1000, "initialBackoff": "500ms", "maxBackoff": "1s"}
    start(failing, workers, "pod-a", target, queue, retry=retry)
    # Half of the 200 a second that are promised, so that it holds beside other tests.
    feed.run("gb" * 10, 8)
    feed.assert_handled(queue)
