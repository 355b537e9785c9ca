"""What target `http` sends to a real HTTPS server, how it divides the work, and whom it blames for an answer."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import random
import signal
import socket
import threading
import time
from email.utils import formatdate
from itertools import pairwise

import pytest

from outbox_core.errors import ConfigurationError, HandlerError, MessagesFailedError, TransientError
from outbox_core.message import Batch, Held, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import Delivery, Target
from outbox_worker.shutdown import Interrupted
from outbox_worker.targets.http import HttpSink
from tests.support.processes import many_files
from tests.support.servers.postgres import free_port, wait_until
from tests.support.servers.receiver import Answer, receiving

KEY = base64.b64encode(b"0123456789abcdef01234567").decode()
PARTITIONED = {"mode": "Partitioned", "partitions": {}}
COMPETING = {"mode": "Competing", "competing": {}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the certificates are; made once."""
    return tmp_path_factory.mktemp("receiver")


@pytest.fixture
def receiver(folder):
    with receiving(folder) as made:
        yield made


@pytest.fixture
def make(receiver, tmp_path):
    """Build sinks for the receiver; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def build(delivery=None, *, keys=None, secret=True, **fields):
            directory = receiver.files(tmp_path / "secret", **(keys or {}))
            chosen = {"url": receiver.url, "requestTimeout": "2s"} | fields
            if secret:
                chosen["connection"] = {"secretRef": {"name": "receiver"}}
            target = Target.model_validate({"http": chosen}).http
            assert target is not None
            return stack.enter_context(
                contextlib.closing(HttpSink(target, directory, Delivery.model_validate(delivery or {})))
            )

        yield build


def message(number, key="k", **fields):
    chosen = {"message_id": f"m-{number}", "message_type": "OrderPlaced", "data": f'{{"n": {number}}}'} | fields
    return Message(100, number, publication_id="shop", partition_key=key, metadata=None, scheduled=None, **chosen)


def batch(*messages, held=()):
    return Batch(Checkpoint(0, 0), messages[-1].checkpoint, messages, len(messages), full=True, held=held)


def failed(sink, *messages, held=()):
    with pytest.raises(MessagesFailedError) as caught:
        sink.deliver(batch(*messages, held=held), 1)
    return {place.position: str(err) for place, err in caught.value.failed.items()}


def refuse(*numbers, status=422):
    names = {f"m-{number}" for number in numbers}
    return lambda request: Answer(status) if request.id in names else Answer(delay=0.01)


class TestWhatIsSent:
    def test_a_signed_event_over_tls(self, receiver, make):
        sink = make(keys={"signingKey": f"whsec_{KEY} {KEY}", "token": "s3cret\n"})
        assert sink.deliver(batch(message(1)), 1) == 1
        (request,) = receiver.requests
        assert request.path == "/events?from=tests"
        assert json.loads(request.body)["data"] == {"n": 1}
        assert request.headers["authorization"] == "Bearer s3cret"
        assert request.headers["idempotency-key"] == request.headers["webhook-id"] == "m-1"
        signed = f"m-1.{request.headers['webhook-timestamp']}.".encode() + request.body
        expected = hmac.new(base64.b64decode(KEY), signed, hashlib.sha256).digest()
        assert request.headers["webhook-signature"] == " ".join([f"v1,{base64.b64encode(expected).decode()}"] * 2)
        assert abs(time.time() - int(request.headers["webhook-timestamp"])) < 30

    def test_binary_mode(self, receiver, make):
        make(contentMode="Binary").deliver(batch(message(1, key="Zürich 1")), 1)
        (request,) = receiver.requests
        assert request.body == b'{"n": 1}'
        assert request.headers["ce-partitionkey"] == "Z%C3%BCrich%201"
        assert "webhook-signature" not in request.headers

    def test_without_tls_and_without_a_secret(self, tmp_path, folder):
        with receiving(folder, tls=False) as plain:
            target = Target.model_validate({"http": {"url": plain.url}}).http
            assert target is not None
            with contextlib.closing(HttpSink(target, tmp_path / "none", Delivery())) as sink:
                sink.check()
                assert sink.deliver(batch(message(1)), 1) == 1

    def test_connections_are_kept_from_batch_to_batch(self, receiver, make):
        sink = make(parallelism=2)
        for start in (1, 11, 21):
            sink.deliver(batch(*(message(n, key=f"k-{n}") for n in range(start, start + 10))), 1)
        assert len({each.connection for each in receiver.requests}) <= 2

    def test_it_posts_though_the_process_has_many_files_open(self, receiver, make):
        with many_files(), contextlib.closing(make()) as sink:
            assert [sink.deliver(batch(message(n)), 1) for n in (1, 2)] == [1, 1]
        assert receiver.ids() == ["m-1", "m-2"]

    def test_a_connection_that_the_receiver_ended_is_made_anew(self, receiver, make):
        sink = make()
        sink.deliver(batch(message(1)), 1)
        for each in receiver.connections:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        receiver.answer = lambda _: Answer(headers={"Connection": "close"})
        for number in (2, 3, 4):
            assert sink.deliver(batch(message(number)), 1) == 1

    def test_an_answer_of_any_length_is_borne(self, receiver, make):
        receiver.answer = lambda _: Answer(200, body=b"x" * 1_000_000)
        sink = make()
        assert sink.deliver(batch(*(message(n) for n in range(5))), 1) == 5


class TestOrder:
    def test_keys_are_posted_side_by_side_and_each_in_its_order(self, receiver, make):
        chance = random.Random(7)
        receiver.answer = lambda _: Answer(delay=chance.uniform(0, 0.02))
        sink = make(parallelism=4)
        messages = [message(n, key=f"k-{n % 9}") for n in range(90)]
        assert sink.deliver(batch(*messages), 1) == 90
        for key, requests in receiver.of_key().items():
            assert [each.id for each in requests] == [each.message_id for each in messages if each.partition_key == key]
            assert all(one.ended <= two.began for one, two in pairwise(requests))
        assert 1 < receiver.most_at_once() <= 4

    def test_parallelism_one_is_the_order_of_the_messages(self, receiver, make):
        messages = [message(n, key=f"k-{n % 3}") for n in range(20)]
        make(parallelism=1).deliver(batch(*messages), 1)
        assert receiver.ids() == [each.message_id for each in messages]

    @pytest.mark.parametrize(
        ("delivery", "parallel"),
        [
            pytest.param({}, False, id="Ordered"),
            pytest.param(PARTITIONED, True, id="Partitioned"),
            pytest.param(COMPETING, True, id="Competing"),
        ],
    )
    def test_messages_without_a_key_keep_their_order_in_mode_ordered_alone(self, receiver, make, delivery, parallel):
        receiver.answer = lambda _: Answer(delay=0.02)
        messages = [message(n, key=None) for n in range(12)]
        make(delivery).deliver(batch(*messages), 1)
        assert (receiver.most_at_once() > 1) is parallel
        if not parallel:
            assert receiver.ids() == [each.message_id for each in messages]

    def test_the_key_is_the_one_that_the_resource_names(self, receiver, make):
        receiver.answer = lambda _: Answer(delay=0.02)
        delivery = {"mode": "Partitioned", "partitions": {"key": {"data": ["order"]}}}
        messages = [message(n, key=f"other-{n}", data=f'{{"order": {n % 2}}}') for n in range(12)]
        make(delivery).deliver(batch(*messages), 1)
        assert receiver.most_at_once() == 2


class TestTheMessagesFault:
    @pytest.mark.parametrize("delivery", [{"blocks": "Key"}, PARTITIONED], ids=["Ordered", "Partitioned"])
    def test_the_refused_and_those_behind_it_are_named_and_the_others_are_posted_once(self, receiver, make, delivery):
        sink = make(delivery)
        receiver.answer = refuse(3)
        messages = [message(n, key=f"k-{n % 3}") for n in range(12)]
        for _ in range(2):
            named = failed(sink, *messages)
            assert list(named) == [3, 6, 9]
            assert "answered 422" in named[3]
            assert "waits behind one that failed" in named[6]
        others = [f"m-{n}" for n in range(12) if n % 3]
        assert sorted(receiver.ids()) == sorted(["m-0", *others])
        receiver.answer = lambda _: Answer()
        assert sink.deliver(batch(*messages), 1) == 12
        assert sorted(receiver.ids()) == sorted(each.message_id for each in messages)

    @pytest.mark.parametrize("delivery", [{"blocks": "Nothing"}, COMPETING], ids=["Nothing", "Competing"])
    def test_where_nothing_waits_only_the_refused_is_named(self, receiver, make, delivery):
        receiver.answer = refuse(3)
        assert list(failed(make(delivery), *(message(n) for n in range(6)))) == [3]

    def test_with_blocks_partition_all_of_its_partition_waits(self, receiver, make):
        receiver.answer = refuse(3)
        assert list(failed(make(parallelism=1), *(message(n, key=f"k-{n}") for n in range(6)))) == [3, 4, 5]

    def test_of_held_messages_only_those_of_its_key_wait(self, receiver, make):
        receiver.answer = refuse(3)
        messages = [message(n, key=f"k-{n}") for n in range(6)]
        held = tuple(Held(each.checkpoint, each.partition_key or "", each.message_id) for each in messages)
        assert list(failed(make(parallelism=1), *messages, held=held)) == [3]

    def test_one_alone_is_reported_with_its_own_error_and_without_the_token(self, receiver, make):
        sink = make(keys={"token": "s3cret"})
        receiver.answer = lambda _: Answer(400, {"Retry-After": "7"}, b"no such\n order\0; you sent s3cret")
        with pytest.raises(HandlerError) as caught:
            sink.deliver(batch(message(1)), 1)
        answered = f"https://localhost:{receiver.port} answered 400 (Retry-After: 7)"
        assert str(caught.value) == f"{answered} no such order ; you sent ***"
        assert (caught.value.error_class, caught.value.retry_after) == ("Http400", 7.0)

    def test_what_cannot_be_an_event_is_named_without_a_request(self, receiver, make):
        named = failed(make({"blocks": "Nothing"}), message(1), message(2, message_type=None))
        assert "its type would be empty" in named[2]
        assert receiver.ids() == ["m-1"]


class TestTheTargetsFault:
    def blamed(self, sink, *messages):
        with pytest.raises((TransientError, ConfigurationError)) as caught:
            sink.deliver(batch(*messages), 1)
        return caught.value

    def test_what_was_taken_before_is_not_posted_again_and_nothing_after(self, receiver, make):
        sink = make(parallelism=1)
        receiver.answer = refuse(5, status=503)
        messages = [message(n, key=f"k-{n}") for n in range(10)]
        assert self.blamed(sink, *messages).error_class == "Http503"
        assert len(receiver.requests) == 6
        receiver.answer = lambda _: Answer()
        assert sink.deliver(batch(*messages), 1) == 10
        assert receiver.ids() == [each.message_id for each in messages]

    @pytest.mark.parametrize("after", ["7", None], ids=["seconds", "a date"])
    def test_it_asks_for_a_wait(self, receiver, make, after):
        when = after or formatdate(time.time() + 8, usegmt=True)
        receiver.answer = lambda _: Answer(429, headers={"Retry-After": when})
        error = self.blamed(make(), message(1))
        assert 5 < (error.retry_after or 0) <= 8
        # A day may pass in which nothing is tried: who looks at the status must see why.
        assert f"answered 429 (Retry-After: {when})" in str(error)

    def test_a_redirect_is_not_followed(self, receiver, make):
        receiver.answer = lambda _: Answer(307, headers={"Location": receiver.url})
        assert "redirects are not followed" in str(self.blamed(make(), message(1)))
        assert len(receiver.requests) == 1

    def test_a_time_out(self, receiver, make):
        receiver.answer = lambda _: Answer(delay=3)
        error = self.blamed(make(requestTimeout="300ms"), message(1))
        assert (error.reason, "timed out" in str(error)) == ("TargetUnavailable", True)

    def test_nothing_listens(self, make):
        assert "refused" in str(self.blamed(make(url=f"https://localhost:{free_port()}/"), message(1)))

    @pytest.mark.parametrize("host", ["localhost:99999", "x" * 64 + ".test", "nowhere.invalid"])
    def test_a_host_that_cannot_be(self, make, host):
        assert self.blamed(make(url=f"https://{host}/"), message(1)).reason == "TargetUnavailable"

    def test_a_certificate_that_is_not_trusted(self, make):
        error = self.blamed(make(secret=False), message(1))
        assert (error.reason, "put the right CA into `ca.crt`" in str(error)) == ("ConnectionSecretInvalid", True)

    def test_a_token_that_is_refused_is_no_messages_fault_and_read_again(self, receiver, make, tmp_path):
        sink = make(keys={"token": "old"})
        receiver.answer = lambda request: Answer(202 if request.headers["authorization"] == "Bearer new" else 401)
        assert self.blamed(sink, message(1), message(2)).reason == "AuthenticationFailed"
        (tmp_path / "secret" / "token").write_text("new")
        assert sink.deliver(batch(message(1), message(2)), 1) == 2

    def test_another_authority_is_read_for_the_next_batch(self, make, tmp_path, tmp_path_factory):
        sink = make()
        with receiving(tmp_path_factory.mktemp("other")) as other:
            trusted = make(url=other.url)
            assert "certificate" in str(self.blamed(trusted, message(1)))
            (tmp_path / "secret" / "ca.crt").write_text(other.authority.read_text())
            assert trusted.deliver(batch(message(1)), 1) == 1
            assert "certificate" in str(self.blamed(sink, message(1)))


class TestWithinTheTime:
    @pytest.fixture
    def interrupt(self):
        """Raise in the main thread what `delivery.timeout` raises, so many seconds from now."""
        before = signal.getsignal(signal.SIGALRM)

        def raise_it(*_):
            raise Interrupted(draining=False)

        signal.signal(signal.SIGALRM, raise_it)
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

    def test_of_several_what_was_taken_is_remembered_and_no_request_is_left(self, receiver, make, interrupt):
        sink = make(parallelism=2, requestTimeout="30s")
        messages, threads = [message(n, key=f"k-{n}") for n in range(10)], threading.active_count()

        def answer(request):
            if len(receiver.requests) == 4:
                interrupt(0.1)
            return Answer(delay=0.0 if request.id in ("m-0", "m-1") else 1.5)

        receiver.answer = answer
        with pytest.raises(Interrupted):
            sink.deliver(batch(*messages), 1)
        wait_until(lambda: threading.active_count() <= threads, "the requests were ended")
        assert len(receiver.requests) == 4
        receiver.answer = lambda _: Answer()
        assert sink.deliver(batch(*messages), 1) == 10
        assert [each.id for each in receiver.requests[4:]].count("m-0") == 0

    def test_an_answer_that_trickles_holds_no_thread(self, make, interrupt):
        with socket.create_server(("127.0.0.1", 0)) as server:
            over = threading.Event()

            def trickle():
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    while not over.wait(0.05):
                        connection.sendall(b"H")

            threads = threading.active_count()
            thread = threading.Thread(target=trickle)
            thread.start()
            sink = make(url=f"http://localhost:{server.getsockname()[1]}/", requestTimeout="30s")
            interrupt(0.4)
            with pytest.raises(Interrupted):
                sink.deliver(batch(message(1)), 1)
            wait_until(lambda: threading.active_count() <= threads + 1, "the sink's thread ended", 3)
            over.set()
            thread.join()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"signingKey": "dG9vIHNob3J0"}, "24 bytes or more"), ({"signingKey": "not base64!"}, "24 bytes or more"),
        ({"token": "two\nlines"}, "one line of printable ASCII"), ({"ca.crt": "nothing"}, "no PEM certificate"),
    ],
)  # fmt: skip
def test_a_secret_that_cannot_be_used(make, keys, told):
    with pytest.raises(ConfigurationError, match=told) as caught:
        make(keys=keys).check()
    assert caught.value.reason == "ConnectionSecretInvalid"
    assert not any(value in str(caught.value) for value in keys.values())


def test_a_key_in_a_column_that_is_not_read_is_refused(make):
    with pytest.raises(ConfigurationError, match=r"source\.table\.columns\.partitionKey names it"):
        make({"mode": "Partitioned", "partitions": {"key": {"column": "customer"}}}).check()
