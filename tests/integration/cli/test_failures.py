"""`dead-letters`, `held` and `redrive` against a database, with the processor's own handler at the other end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.cli.conftest import Cli
from tests.support.failing import KEYS, Failing
from tests.support.servers.postgres import wait_until
from tests.support.worker import PYTHON_HANDLER, PYTHON_TARGET, SQL_TARGET, Outbox, Workers

QUICK = {"maxAttempts": 1, "initialBackoff": "50ms", "maxBackoff": "100ms"}


@pytest.fixture
def failing(database):
    return Failing(Outbox(database))


@pytest.fixture
def workers(tmp_path):
    running = Workers(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def call(failing, tmp_path):
    """Runs `outbox` against the database; returns exit status, output and errors."""
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "uri").write_text(failing.outbox.database.uri())

    def run(*arguments, background=False):
        if background:
            command = [sys.executable, "-m", "outbox_cli", *arguments, "--connection", str(secret)]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        done = Cli(secret).run(*arguments)
        return done.returncode, done.stdout, done.stderr

    return run


def start(failing, workers, **delivery):
    config = failing.config(SQL_TARGET, **{"whenExhausted": "DeadLetter", "retry": QUICK} | delivery)
    return workers.start(config, failing.outbox.database.uri())


def listed(call, *arguments):
    status, out, err = call("dead-letters", "list", "-o", "json", *arguments)
    assert status in (0, 4), err
    return json.loads(out)


def test_looking_and_redriving_by_key_keeps_the_order(failing, workers, call):
    failing.break_at(7, 8)
    failing.produce(60)
    start(failing, workers)
    failing.wait_dead(2)
    failing.wait_handled(set(range(60)) - set(range(7, 60, KEYS)) - set(range(8, 60, KEYS)))
    wait_until(lambda: len(failing.held()) == 20, "both keys wait")

    letters = listed(call, "orders", "--check")
    assert [(each["messageId"], each["errorClass"], each["behind"]) for each in letters] == [
        ("message-7", "P0042", 10), ("message-8", "P0042", 10)
    ]  # fmt: skip
    assert listed(call, "orders", "--key", "key-3", "--payload")[0]["data"] == '{"total": 8}'
    assert listed(call, "orders", "--error", "REFUSED message-8")[0]["messageId"] == "message-8"
    assert listed(call, "orders", "--type", "Other") == []
    assert listed(call, "orders", "--until", "2020-01-01T00:00:00Z") == []
    assert len(listed(call, "orders", "--since", "2020-01-01T00:00:00Z", "--error-class", "P0042")) == 2

    status, out, _ = call("redrive", "orders", "--key", "key-2", "--dry-run")
    assert (status, out.splitlines()[0]) == (0, "1 dead letter and 0 stopped messages would be handled again")
    failing.mend()
    assert len(failing.dead()) == 2
    status, out, err = call("redrive", "orders", "--key", "key-2", "--reason", "mended", "--yes")
    assert (status, out.startswith("1 redriven; recorded in the audit log for ")) == (0, True), err
    failing.wait_handled(set(range(60)) - set(range(8, 60, KEYS)))
    status, _, _ = call("dead-letters", "drop", "orders", "--id", str(letters[1]["id"]), "--reason", "old", "--yes")
    assert status == 0
    failing.wait_handled(set(range(60)) - {8})
    failing.assert_once_and_in_order()
    acts = failing.connection.execute("SELECT action, reason FROM outbox.audit_log ORDER BY id").fetchall()
    assert acts == [
        ("Redrive", "1 dead letter: mended"),
        ("DropDeadLetter", "message message-8 of type Numbered, key key-3: old"),
    ]
    assert (failing.held(), failing.dead()) == ([], [])


def test_a_redrive_that_is_killed_halfway_is_done_by_the_same_command_again(failing, workers, call):
    failing.break_at(*range(60))
    failing.produce(60)
    start(failing, workers, blocks="Nothing", circuitBreaker={"failures": 10_000})
    failing.wait_dead(60, 120)
    failing.mend()
    arguments = ("redrive", "orders", "--all", "--rate", "10", "--reason", "mended", "--yes")
    first = call(*arguments, background=True)
    wait_until(lambda: len(failing.dead()) < 60, "the first are redriven")
    first.send_signal(signal.SIGKILL)
    first.communicate()
    left = len(failing.dead())
    assert 0 < left < 60
    status, out, err = call(*arguments)
    assert status == 0, err
    assert out.startswith(f"{left} redriven")
    failing.wait_handled(set(range(60)))
    assert len(failing.handled()) == 60, "an effect is doubled"


def test_a_redrive_is_about_what_was_there_when_it_was_asked(failing, workers, call):
    failing.break_at(*range(4))
    failing.produce(6)
    start(failing, workers, blocks="Nothing", circuitBreaker={"failures": 10_000})
    failing.wait_dead(4)
    asked = {each["id"] for each in listed(call, "orders")}
    redriving = call("redrive", "orders", "--all", "--rate", "2", "--reason", "try", "--yes", background=True)
    try:
        # Each dies again, under another number, long before the last one's turn.
        out, err = redriving.communicate(timeout=20)
    finally:
        redriving.kill()
        redriving.communicate()
    assert (redriving.returncode, out.startswith(b"4 redriven")) == (0, True), err
    failing.wait_dead(4)
    assert asked.isdisjoint(each["id"] for each in listed(call, "orders"))


def test_a_redrive_whose_connection_is_lost_ends_and_says_how_far_it_was(failing, workers, call):
    failing.break_at(*range(20))
    failing.produce(20)
    running = start(failing, workers, blocks="Nothing", circuitBreaker={"failures": 10_000})
    failing.wait_dead(20)
    running.process.terminate()
    redriving = call("redrive", "orders", "--all", "--rate", "4", "--reason", "try", "--yes", background=True)
    wait_until(lambda: len(failing.dead()) < 20, "the first are redriven")
    failing.connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'outbox-cli'"
    )
    lost = time.monotonic()
    _, err = redriving.communicate(timeout=60)
    assert redriving.returncode == 1
    assert time.monotonic() - lost < 10, "a lost connection does not come back by asking it again"
    done = 20 - len(failing.dead())
    assert f"{done} were redriven before" in err.decode()


def test_a_stopped_key_is_tried_again_or_given_up_by_the_same_commands(failing, workers, call):
    failing.break_at(7, 8)
    failing.produce(30)
    start(failing, workers, whenExhausted="Stop")
    free = set(range(30)) - set(range(7, 30, KEYS)) - set(range(8, 30, KEYS))
    failing.wait_handled(free)

    def stopped():
        status, out, err = call("held", "list", "orders", "--stopped", "-o", "json")
        assert status == 0, err
        return [(each["key"], each["state"], each["behind"]) for each in json.loads(out)]

    wait_until(lambda: stopped() == [("key-2", "Stopped", 4), ("key-3", "Stopped", 4)], "both keys are stopped")
    failing.mend()
    assert call("redrive", "orders", "--key", "key-2", "--reason", "mended", "--yes")[0] == 0
    assert call("dead-letters", "drop", "orders", "--message-id", "message-8", "--reason", "old", "--yes")[0] == 0
    failing.wait_handled(set(range(30)) - {8})
    failing.assert_once_and_in_order()


def stop(failing, count):
    """Held messages that wait for a person, of two partitions, as a worker leaves them."""
    failing.connection.execute(
        "INSERT INTO outbox.held_messages (processor_id, partition, key, place, transaction_id, position, message_id, "
        "message_type, blocks, behind, attempts, next_attempt_at) SELECT 'orders', n %% 2, 'k' || n, n, '5'::xid8, n, "
        "'message-' || n, 'Numbered', true, false, 3, 'infinity' FROM generate_series(1, %s::int) AS n",
        (count,),
    )


@pytest.mark.parametrize("command", [("redrive",), ("dead-letters", "drop")], ids=["redrive", "drop"])
def test_stopped_messages_are_decided_about_in_short_transactions(failing, call, command):
    stop(failing, 1_203)
    status, out, err = call(*command, "orders", "--all", "--reason", "mended", "--yes")
    assert (status, out.split()[0]) == (0, "1203"), err
    acts = failing.connection.execute(
        "SELECT sum(coalesce(substring(reason from '^[0-9]+(?= held)')::int, 1)), count(DISTINCT xmin::text) "
        "FROM outbox.audit_log"
    ).fetchone()
    assert acts == (1_203, 4), "602 and 601 in transactions of at most 500"


def test_a_rate_holds_for_stopped_messages_too(failing, call):
    stop(failing, 8)
    status, out, err = call("redrive", "orders", "--all", "--rate", "4", "--reason", "mended", "--yes")
    assert (status, out.split()[0]) == (0, "8"), err
    acts = failing.connection.execute(
        "SELECT reason, decided_at - min(decided_at) OVER () FROM outbox.audit_log ORDER BY id"
    ).fetchall()
    assert [reason for reason, _ in acts] == ["4 held messages: mended"] * 2
    assert acts[1][1].total_seconds() > 0.8, "no faster than asked"


def test_a_long_key_is_cut_in_a_table_and_whole_in_json(failing, call):
    """Each row of a table is as wide as the widest."""
    key = "k" * 65_536
    failing.connection.execute(
        "INSERT INTO outbox.dead_letters (processor_id, key, transaction_id, position, message_id, message_type, data, "
        "attempts, error_class, error, blocks, place) VALUES "
        "('orders', %s, '5', 1, 'message-1', 'm', '{}', 1, 'ValueError', 'no', true, 1)",
        (key,),
    )
    failing.connection.execute(
        "INSERT INTO outbox.held_messages (processor_id, partition, key, place, transaction_id, position, message_id, "
        "message_type, data, blocks, behind) VALUES ('orders', 0, %s, 2, '5', 2, 'message-2', 'm', '{}', true, false)",
        (key,),
    )
    for command in (
        ("dead-letters", "list", "orders"),
        ("held", "list", "orders"),
        ("redrive", "orders", "--all", "--dry-run", "--reason", "r"),
    ):
        status, out, _ = call(*command)
        assert status == 0
        assert f" {'k' * 59}…" in out
        assert max(map(len, out.splitlines())) < 400
    for kind in ("dead-letters", "held"):
        assert json.loads(call(kind, "list", "orders", "-o", "json")[1])[0]["key"] == key


def test_a_list_that_is_cut_says_so(failing, call):
    stop(failing, 3)
    _, out, err = call("held", "list", "orders", "--limit", "2")
    assert (len(out.splitlines()), err) == (3, "the first 2; see --limit\n")
    assert call("held", "list", "orders", "--limit", "4")[2] == ""


def test_a_message_that_waits_behind_another_one_is_found_by_its_id(failing, call):
    stop(failing, 2)
    failing.connection.execute(
        "INSERT INTO outbox.held_messages (processor_id, partition, key, place, transaction_id, position, message_id, "
        "blocks, behind) SELECT 'orders', 0, 'k2', n, '5', n, 'message-' || n, true, true FROM generate_series(3, 5) n"
    )

    def found(*arguments):
        status, out, err = call("held", "list", "orders", *arguments, "-o", "json")
        assert status == 0, err
        return {each["messageId"]: (each["state"], each["behind"], each["nextAttemptAt"]) for each in json.loads(out)}

    assert found("--message-id", "message-4") == {"message-4": ("Behind", 1, None)}
    assert found("--message-id", "message-4", "--message-id", "message-2").keys() == {"message-2", "message-4"}
    assert found("--message-id", "message-4", "--stopped") == {}
    assert found("--key", "k2") == {"message-2": ("Stopped", 3, None)}
    assert call("redrive", "orders", "--message-id", "message-4", "--reason", "x", "--yes")[0] == 3


def test_what_is_not_said_is_refused(failing, call):
    failing.produce(1)
    assert call("redrive", "orders")[0] == 2
    assert call("redrive", "--all", "--reason", "x")[0] == 2
    assert call("redrive", "orders", "--all")[0] == 2
    status, _, err = call("redrive", "orders", "--all", "--reason", "x", "--yes")
    assert (status, err.strip().splitlines()[-1]) == (3, "outbox: no dead letter and no stopped message is so")


@pytest.mark.parametrize(
    "queue", [pytest.param(None, id="outbox"), pytest.param("jobs", id="queue", marks=pytest.mark.nightly)]
)
def test_dead_letters_of_competing_consumers_are_redriven(failing, workers, call, queue):
    """By type, key, time, error and id, with dry run and rate; with no order to keep."""
    over = {"leaseDuration": "2s"} | ({"queue": queue} if queue else {})
    connection = failing.connection
    connection.execute("SELECT outbox.create_queue('jobs')")
    connection.execute(
        f"INSERT INTO outbox.{'queue_jobs' if queue else 'messages'} (partition_key, message_id, message_type, data) "
        "SELECT 'key-' || n % 5, 'message-' || n, 'Numbered', jsonb_build_object('total', n) "
        "FROM generate_series(0, 59) AS n"
    )
    failing.break_at(*range(20))
    delivery = {"mode": "Competing", "competing": over, "leaseDuration": "15s", "circuitBreaker": {"failures": 1000}}
    config = failing.config(
        SQL_TARGET, partitioned=False, cursor=None, whenExhausted="DeadLetter", retry=QUICK, **delivery
    )
    config["source"].pop("cursor")
    workers.start(config, failing.outbox.database.uri())
    failing.wait_dead(20)
    failing.wait_handled(set(range(20, 60)))
    failing.mend()
    if not queue:
        connection.execute("DELETE FROM outbox.messages")

    status, out, _ = call("redrive", "orders", "--type", "Numbered", "--key", "key-3", "--dry-run")
    assert (status, out.splitlines()[0]) == (0, "4 dead letters and 0 stopped messages would be handled again")
    assert len(failing.dead()) == 20
    said = ("--reason", "mended", "--yes")
    one = listed(call, "orders", "--message-id", "message-7")[0]["id"]
    for chosen, expected in (
        (("--id", str(one)), {7}),
        (("--key", "key-3", "--type", "Numbered"), {3, 8, 13, 18}),
        (("--error", "refused message-1", "--error-class", "P0042"), {1, *range(10, 20)}),
    ):
        status, _, err = call("redrive", "orders", *chosen, *said)
        assert status == 0, err
        failing.wait_handled(set(failing.handled()) | expected)
    status, out, err = call("redrive", "orders", "--since", "2020-01-01T00:00:00Z", "--rate", "3", *said)
    assert (status, out.startswith("6 redriven")) == (0, True), err
    failing.wait_handled(set(range(60)))
    assert len(failing.handled()) == 60, "an effect is doubled"
    assert failing.dead() == []

    status, _, err = call("rewind", "orders", "--to-beginning", *said)
    assert status != 0
    assert ("insert them anew" if queue else "another processorId with startFrom") in err


@pytest.mark.parametrize("target", [SQL_TARGET, PYTHON_TARGET], ids=["sql", "python"])
@pytest.mark.parametrize("queue", [None, "jobs"], ids=["outbox", "queue"])
def test_what_a_later_filter_leaves_out_is_redriven_to_consumers(failing, workers, call, queue, target):
    """It passed the filter when it was handed out, as a held message did."""
    failing.connection.execute("SELECT outbox.create_queue('jobs')")
    failing.connection.execute(
        f"INSERT INTO outbox.{'queue_jobs' if queue else 'messages'} (publication_id, message_id, message_type, data) "
        "SELECT 'shop', 'message-' || n, 'Numbered', jsonb_build_object('total', n) FROM generate_series(0, 9) AS n"
    )
    failing.break_at(*range(5))
    over = {"leaseDuration": "2s"} | ({"queue": queue} if queue else {})
    delivery = {"mode": "Competing", "competing": over, "leaseDuration": "15s", "batchSize": 3}
    config = failing.config(target, partitioned=False, cursor=None, whenExhausted="DeadLetter", retry=QUICK, **delivery)
    config["source"].pop("cursor")
    uri = failing.outbox.database.uri()
    first = workers.start(config, uri, handler=PYTHON_HANDLER)
    failing.wait_dead(5)
    failing.wait_handled(set(range(5, 10)))
    first.terminate()
    failing.mend()
    config["source"] |= {"messageTypes": ["Another"], "publications": ["another"]}
    workers.start(config, uri, handler=PYTHON_HANDLER).wait_state("Active")

    status, out, err = call("redrive", "orders", "--all", "--reason", "corrected", "--yes")

    assert (status, out.startswith("5 redriven")) == (0, True), err
    failing.wait_handled(set(range(10)))
    assert len(failing.handled()) == 10
