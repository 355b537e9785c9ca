"""Chaos' own parts, on real servers: a producer that lost an answer, a clock that is stepped, a judge's SQL."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from tests.support.servers.postgres import wait_until
from tests.tools.chaos.processes.pods import shim
from tests.tools.chaos.processes.producer import MARK, Producer
from tests.tools.chaos.verdict import partition_of
from tests.tools.ledger.commitlog import read_commit_logs

SCHEMA = Path(__file__).resolve().parents[2] / "tools" / "chaos" / "schema.sql"


@pytest.fixture
def prepared(database):
    """A migrated database with chaos' schema."""
    with database.direct() as connection:
        connection.execute(SCHEMA.read_text())
    return database


@pytest.fixture
def producer(prepared, tmp_path):
    made = Producer(prepared.uri(), 0, 1, tmp_path, rate=1000)
    yield made
    made._drop()
    made._log.close()


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
def test_commit_without_an_answer_is_waited_for_and_told_as_it_ended(prepared, producer, end) -> None:
    mark = str(uuid4())
    other = prepared.direct(autocommit=False)
    other.execute(MARK, [mark])
    answers: list[bool] = []
    asking = threading.Thread(target=lambda: answers.append(producer._has_committed(mark)))
    asking.start()
    look = prepared.direct()
    wait_until(
        lambda: look.execute("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone() is not None,
        "the producer waits for the transaction that is still open",
    )
    assert answers == []
    other.execute(end)
    asking.join(10)
    assert answers == [end == "COMMIT"]


def test_transaction_that_is_believed_lost_can_never_commit(prepared, producer) -> None:
    mark = str(uuid4())
    assert not producer._has_committed(mark)
    assert not producer._has_committed(mark), "asked again, because its own answer was lost"
    with pytest.raises(psycopg.errors.UniqueViolation), prepared.direct(autocommit=False) as late:
        late.execute(MARK, [mark])


def count(connection) -> int:
    return int(connection.execute("SELECT count(*) FROM outbox.messages").fetchone()[0])


def has_grown(connection, seen: int) -> bool:
    return count(connection) > seen


def test_commit_log_is_what_the_database_has_though_backends_are_terminated(prepared, producer, tmp_path) -> None:
    running = threading.Thread(target=producer.run)
    running.start()
    with prepared.direct() as strangler:
        for _ in range(20):
            seen = count(strangler)
            wait_until(partial(has_grown, strangler, seen), "the producer goes on")
            strangler.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'producer-%'"
            )
    producer.stopping = True
    running.join(20)
    written = {message.message_id: message.pair for message in read_commit_logs(tmp_path)}
    rows = prepared.direct().execute("SELECT message_id, transaction_id::text, position FROM outbox.messages")
    assert written == {message_id: (int(xid), position) for message_id, xid, position in rows}
    assert written


def test_producers_share_keys_in_the_order_of_their_commits_and_queues_get_every_message(prepared, tmp_path) -> None:
    look = prepared.direct()
    look.execute("SELECT outbox.create_queue('of_tests')")
    made = [Producer(prepared.uri(), number, 5, tmp_path, rate=1000, queues=["of_tests"]) for number in range(2)]
    running = [threading.Thread(target=each.run) for each in made]
    for thread in running:
        thread.start()
    written_by_two = (
        "SELECT count(*) FROM (SELECT 1 FROM outbox.messages WHERE partition_key LIKE 'shared-%' "
        "GROUP BY partition_key HAVING count(*) > 3) AS keys"
    )
    wait_until(lambda: look.execute(written_by_two).fetchone() == (6,), "every shared key is written to", 60)
    for each, thread in zip(made, running, strict=True):
        each.stopping = True
        thread.join(20)
    written = read_commit_logs(tmp_path)  # which refuses a key whose numbers are not the commits'
    shared = [message for message in written if message.key.startswith("shared-")]
    assert {message.producer for message in shared} == {0, 1}
    queued = look.execute("SELECT message_id FROM outbox.queue_of_tests").fetchall()
    assert sorted(row[0] for row in queued) == sorted(message.message_id for message in written)


def look_at_clocks(process: subprocess.Popen[str]) -> tuple[float, float]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    wall, monotonic, slept = process.stdout.readline().split()
    assert slept == "True"
    return float(wall), float(monotonic)


def start_with_clock(program: str, clock: Path) -> subprocess.Popen[str]:
    """Start Python with a clock that the file steps, by nothing yet."""
    clock.write_bytes(bytes(8))
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"LD_PRELOAD": str(shim()), "STEPCLOCK_FILE": str(clock)},
    )  # fmt: skip


def step(clock: Path, seconds: float) -> None:
    """Step the clock in its place: the process has the file in its memory, which must not be cut off meanwhile."""
    with clock.open("r+b") as file:
        file.write(struct.pack("=q", int(seconds * 1_000_000_000)))


def test_only_the_wall_clock_of_the_process_is_stepped(tmp_path) -> None:
    clock = tmp_path / "clock"
    program = (
        "import sys, time\n"
        "for _ in sys.stdin:\n"
        "    began = time.monotonic(); time.sleep(0.01)\n"
        "    print(time.time(), time.monotonic(), time.monotonic() - began < 5, flush=True)\n"
    )
    with start_with_clock(program, clock) as process:
        before = look_at_clocks(process)
        for seconds in (3600, -86_400, 0):
            step(clock, seconds)
            after = look_at_clocks(process)
            passed = after[1] - before[1]
            assert 0 <= passed < 60
            assert after[0] - before[0] - passed == pytest.approx(seconds, abs=1)
        process.communicate()


def test_a_client_that_waits_by_the_wall_clock_waits_no_longer_after_a_step(tmp_path) -> None:
    clock = tmp_path / "clock"
    program = (
        "import sys, time\n"
        "from confluent_kafka import Producer\n"
        "client = Producer({'bootstrap.servers': '127.0.0.1:1', 'log_level': 0})\n"
        "for _ in sys.stdin:\n"
        "    began = time.monotonic()\n"
        "    try: client.list_topics('orders', timeout=0.5)\n"
        "    except Exception: print(time.monotonic() - began, flush=True)\n"
    )
    with start_with_clock(program, clock) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for seconds in (0, 15, -15):
            step(clock, seconds)
            process.stdin.write("\n")
            process.stdin.flush()
            assert 0.4 < float(process.stdout.readline()) < 10, f"after a step of {seconds} s"
        process.communicate()


def test_partition_in_sql_is_the_judges(prepared) -> None:
    keys = [f"order-{n}" for n in range(300)] + ["", "schlüssel", "鍵"]
    rows = (
        prepared.direct()
        .execute("SELECT key, chaos.partition_of(key, 4) FROM unnest(%s::text[]) AS key", [keys])
        .fetchall()
    )
    assert dict(rows) == {key: partition_of(key, 4) for key in keys}


@pytest.mark.parametrize(
    ("session", "worker"),
    [
        ("outbox ordered-sql worker-3", "worker-3"),
        ("outbox ordered-sql worker-3 heartbeat", "worker-3"),
        ("outbox shared-ordered-sql.worker-12", "shared-ordered-sql.worker-12"),
        ("observer", None),
    ],
)
def test_the_worker_of_a_session_is_found_by_its_name(prepared, session, worker) -> None:
    with prepared.direct() as connection:
        assert connection.execute("SELECT chaos.worker_of(%s)", [session]).fetchone() == (worker,)
