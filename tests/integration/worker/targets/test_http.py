"""Target `http` with real workers and a real HTTPS server: nothing is lost, and each key keeps its order."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.message import Batch, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import Delivery
from outbox_core.spec.target import HttpTarget
from outbox_worker.targets import http
from tests.support.nightly import at_night
from tests.support.servers.postgres import wait_until
from tests.support.servers.receiver import Answer, answering, read_head, receiving
from tests.support.worker import FAST, build_config

COUNT, WRONG = 300, 150
MODES: dict[str, dict[str, Any]] = {
    "Ordered": {"mode": "Ordered"},
    "Ordered, key": {"mode": "Ordered", "blocks": "Key"},
    "Partitioned": {"mode": "Partitioned", "partitions": {"count": 4}},
    "Competing": {"mode": "Competing", "competing": {"leaseDuration": "5s"}},
}
FEW: dict[str, Any] = {"retry": {"maxAttempts": 3, "initialBackoff": "50ms", "maxBackoff": "100ms"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("receiver")


@pytest.fixture
def receiver(folder):
    with receiving(folder) as made:
        yield made


@pytest.fixture
def start(outbox, workers, receiver):
    """Start a worker whose target is the receiver, with these keys in its Secret."""

    def started(delivery=None, *, keys=None, target=None, **fields):
        http = {"url": receiver.url, "connection": {"secretRef": {"name": "receiver"}}} | (target or {})
        config = build_config(
            outbox.database, {"http": http}, delivery=delivery or {}, source={"cursor": None}, **fields
        )
        home = workers.prepare(config, outbox.database.uri())
        receiver.files(home / "connections/target", **(keys or {}))
        return workers.launch(home)

    return started


def number(identity):
    return int(identity.split("-")[1])


def dead(outbox):
    rows = outbox.connection.execute("SELECT message_id, error_class, attempts FROM outbox.dead_letters").fetchall()
    return [tuple(row) for row in rows]


def in_order(receiver):
    """Whether the first request of each message came in the order of its key."""
    for requests in receiver.of_key().values():
        first = list(dict.fromkeys(number(each.id) for each in requests if each.status == 202))
        if first != sorted(first):
            return False
    return True


@pytest.mark.parametrize("mode", MODES)
def test_every_message_arrives_once_and_one_that_is_refused_becomes_a_dead_letter(outbox, receiver, start, mode):
    ids = outbox.produce(COUNT)
    receiver.answer = lambda request: Answer(400, body=b"bad") if number(request.id) == WRONG else Answer()
    worker = start(FEW | MODES[mode] | {"whenExhausted": "DeadLetter"})
    wait_until(lambda: dead(outbox) == [(f"message-{WRONG}", "Http400", 3)], "it is a dead letter", 30)
    # Where keys wait, what comes after it waits behind its dead letter.
    waits = mode in ("Ordered, key", "Partitioned")
    arriving = [
        each for each in ids
        if number(each) != WRONG and not (waits and number(each) > WRONG and number(each) % 7 == WRONG % 7)
    ]  # fmt: skip
    wait_until(lambda: len(receiver.ids()) >= len(arriving), "the others arrive", 30)
    worker.wait_for("it goes on", lambda report: report.state == "Active")
    assert sorted(receiver.ids()) == sorted(arriving)
    assert mode == "Competing" or in_order(receiver)


@pytest.mark.parametrize("mode", [*at_night("Ordered", "Ordered, key"), "Partitioned", "Competing"])
def test_a_receiver_that_is_down_opens_the_breaker_and_nothing_is_lost(outbox, receiver, start, mode):
    ids = outbox.produce(COUNT)
    down = threading.Event()

    def answer(request):
        if number(request.id) == WRONG and len(receiver.ids()) > 20 and not down.is_set():
            down.set()
        return Answer(503) if down.is_set() else Answer()

    receiver.answer = answer
    breaker = {"circuitBreaker": {"failures": 2, "openFor": "1s", "probes": 1}}
    worker = start(MODES[mode] | breaker)
    worker.wait_for("the breaker is open", lambda report: report.reason == "CircuitOpen")
    assert re.search(r'^outbox_circuit\{[^}]*phase="Open"[^}]*\} 1', worker.get("/metrics")[1], re.MULTILINE)
    receiver.answer = lambda _: Answer()
    wait_until(lambda: len(receiver.ids()) >= COUNT, "all arrive", 60)
    worker.wait_for("it goes on", lambda report: report.state == "Active" and report.handled == COUNT)
    assert sorted(receiver.ids()) == sorted(ids)
    assert dead(outbox) == []
    assert mode == "Competing" or in_order(receiver)


def test_too_many_requests_are_waited_for_as_long_as_the_receiver_asks(outbox, receiver, start):
    outbox.produce(1)
    receiver.answer = lambda _: Answer(429, {"Retry-After": "2"}) if len(receiver.requests) == 1 else Answer()
    worker = start()
    worker.wait_for("it is handled", lambda report: report.handled == 1)
    first, second = receiver.requests
    assert second.began - first.ended >= 2.0
    assert first.id == second.id


@pytest.mark.parametrize("status", [429, 503])
def test_what_one_partition_is_asked_to_wait_all_of_the_process_wait(outbox, receiver, start, status):
    outbox.produce(COUNT)
    receiver.answer = lambda _: Answer(status, {"Retry-After": "3"}) if len(receiver.requests) == 1 else Answer()
    worker = start(MODES["Partitioned"], target={"parallelism": 1})
    worker.wait_for("all are handled", lambda report: report.handled == COUNT)
    first, second, *_ = receiver.requests
    assert second.began - first.ended >= 3.0
    assert in_order(receiver)


@pytest.mark.parametrize("mode", ["Ordered", *at_night("Ordered, key", "Partitioned"), "Competing"])
def test_a_worker_that_is_killed_before_it_stores_repeats_with_the_same_keys(outbox, receiver, start, mode):
    ids = outbox.produce(COUNT)
    reached = threading.Event()

    def answer(request):
        if number(request.id) == WRONG:
            reached.set()
        return Answer(delay=0.002)

    receiver.answer = answer
    worker = start(MODES[mode])
    assert reached.wait(30)
    worker.kill()
    before = set(receiver.ids())
    assert before < set(ids)
    start(MODES[mode])
    wait_until(lambda: set(receiver.ids()) == set(ids), "all arrive", 30)
    assert len(receiver.ids()) > len(ids), "the batch that was not stored is repeated"
    if mode != "Competing":
        for requests in receiver.of_key().values():
            numbers = [number(each.id) for each in requests]
            again = next((at for at in range(1, len(numbers)) if numbers[at] <= numbers[at - 1]), len(numbers))
            assert numbers[again:] == sorted(numbers[again:]), "repeated from one place on, in order"


@pytest.mark.parametrize("head", [b"HTTP/1.1 503 Busy\r\nX-Long: " + b"x" * 999, b"HTTP/1.1 102 Wait\r\n\r\n" * 50])
def test_an_answer_whose_head_trickles_is_none_when_its_time_is_over(outbox, start, head):
    """A byte now and then is no silence: only delivery.timeout would end it."""

    def trickle(connection):
        read_head(connection)
        for byte in head:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)

    outbox.produce(1)
    with answering(trickle) as url:
        worker = start(target={"url": url, "requestTimeout": "300ms"})
        report = worker.wait_state("Retrying", "TargetUnavailable", 15)
    assert "timed out" in report.message


def test_each_answer_has_a_time_of_its_own(outbox, receiver, start):
    ids = outbox.produce(4)
    receiver.answer = lambda _: Answer(delay=0.7)
    worker = start(target={"parallelism": 1, "requestTimeout": "2s"})
    worker.wait_for("all are handled", lambda report: report.handled == 4)
    assert receiver.ids() == ids


def test_a_token_that_rotates_is_read_again(outbox, receiver, start):
    ids = outbox.produce(5)
    receiver.answer = lambda request: Answer(202 if request.headers["authorization"] == "Bearer new" else 401)
    worker = start({"retry": {"maxAttempts": 1}, "whenExhausted": "DeadLetter"}, keys={"token": "old"})
    worker.wait_state("Unavailable", "AuthenticationFailed")
    (worker.directory / "connections/target/token").write_text("new")
    worker.wait_for("all is handled", lambda report: report.handled == 5)
    assert sorted(receiver.ids()) == sorted(ids)
    assert dead(outbox) == []
    assert "old" not in worker.log()


def test_it_is_told_in_order_per_key_by_two_replicas(outbox, receiver, start):
    ids = outbox.produce(COUNT)
    receiver.answer = lambda _: Answer(delay=0.005)
    one = start(MODES["Partitioned"])
    two = start(MODES["Partitioned"])
    wait_until(lambda: len(receiver.ids()) >= COUNT, "all arrive", 60)
    outbox.produce(COUNT, start=COUNT)
    wait_until(lambda: set(receiver.ids()) >= {f"message-{2 * COUNT}"}, "later ones arrive", 60)
    assert one.terminate() == two.terminate() == 0
    assert set(ids) <= set(receiver.ids())
    assert in_order(receiver)


def test_outbox_run(outbox, receiver, tmp_path):
    ids = outbox.produce(3)
    target = {"http": {"url": receiver.url, "connection": {"secretRef": {"name": "receiver"}}}}
    spec = {"source": {"connection": {"secretRef": {"name": "db"}}}, "target": target, "delivery": FAST}
    head = {"apiVersion": "outbox-operator.dev/v1alpha1", "kind": "OutboxProcessor", "metadata": {"name": "orders"}}
    (tmp_path / "orders.yaml").write_text(yaml.safe_dump(head | {"spec": spec}))
    (tmp_path / "source").symlink_to(outbox.database.files().directory)
    receiver.files(tmp_path / "target", token="s3cret")
    program = Path(sys.executable).with_name("outbox")
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, "run", "-f", tmp_path / "orders.yaml", "--connections", tmp_path], stderr=log
        )
    try:
        wait_until(lambda: len(receiver.ids()) == 3, "three messages arrive", 30)
        wait_until(lambda: outbox.stored() == "0:4", "the counter of the fourth message to come is stored")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0, (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
    assert sorted(receiver.ids()) == sorted(ids)
    assert "s3cret" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize("most", [0, 1, 3])
def test_where_few_threads_can_be_started_those_post_all_of_it(receiver, tmp_path, monkeypatch, most):
    """A pod's process ids are limited. Each message is posted once, by as many as there are."""
    left = [most]

    class Limited(threading.Thread):
        @override
        def start(self):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
            super().start()

    monkeypatch.setattr(http, "Thread", Limited)
    target = HttpTarget.model_validate({"url": receiver.url, "connection": {"secretRef": {"name": "receiver"}}})
    sink = http.HttpSink(target, receiver.files(tmp_path / "secret"), Delivery())
    messages = tuple(
        Message(100, n, f"m-{n}", "OrderPlaced", "shop", f"k-{n % 7}", "{}", None, None) for n in range(1, 21)
    )
    batch = Batch(Checkpoint(0, 0), messages[-1].checkpoint, messages, len(messages), full=True)
    with contextlib.closing(sink):
        if not most:
            with pytest.raises(TransientError, match="cannot start a thread to post with"):
                sink.deliver(batch, 1)
            left[0] = 8
        assert sink.deliver(batch, 1) == 20
    assert sorted(map(number, receiver.ids())) == list(range(1, 21))
    assert in_order(receiver)
