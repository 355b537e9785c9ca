"""Target `http` and answers that are out of the ordinary: early, interim, without an end, or none that HTTP knows."""

from __future__ import annotations

import time

import pytest

from outbox_core.errors import HandlerError, TransientError
from tests.integration.worker.targets.test_http_sink import batch, folder, make, message, receiver
from tests.support.servers.receiver import answering, read_head

__all__ = ["folder", "make", "receiver"]


@pytest.mark.parametrize("ends", [True, False], ids=["closed", "left open"])
@pytest.mark.parametrize("tls", [True, False])
def test_a_message_that_is_refused_before_all_of_it_is_sent_is_to_blame(receiver, make, tls, ends):
    """As servers do with a body that is too large: they answer, read no more of it and close, or just wait."""

    def refuse_early(connection):
        with receiver.context.wrap_socket(connection, server_side=True) if tls else connection as opened:
            read_head(opened)
            opened.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            if not ends:
                time.sleep(5)

    with answering(refuse_early) as url:
        sink = make(url=url.replace("http:", "https:") if tls else url, requestTimeout="1s")
        for number in (1, 2):
            with pytest.raises(HandlerError) as caught:
                sink.deliver(batch(message(number, data=f'"{"x" * 20_000_000}"')), 1)
            assert caught.value.error_class == "Http413"


def test_what_was_not_sent_wholly_is_not_taken_whatever_the_answer_is(make):
    def accept_early(connection):
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with answering(accept_early) as url, pytest.raises(TransientError, match="did not answer"):
        make(url=url).deliver(batch(message(1, data=f'"{"x" * 20_000_000}"')), 1)


def test_a_connection_that_the_receiver_ends_as_a_request_comes_is_no_fault_of_its(make):
    """It ends what was idle for a while, or an instance of it stops; it did not see the request."""

    def answer_once(connection):
        read_head(connection)
        connection.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n")
        read_head(connection)

    with answering(answer_once) as url:
        sink = make(url=url, contentMode="Binary", parallelism=1)
        assert sink.deliver(batch(*(message(n, data=None) for n in range(9))), 1) == 9


def test_a_new_connection_that_ends_without_an_answer_is_not_made_again_at_once(make):
    heads: list[bytes] = []
    end_at_once, told = answering(lambda connection: heads.append(read_head(connection))), "did not answer"
    with end_at_once as url, pytest.raises(TransientError, match=told):
        make(url=url).deliver(batch(message(1, data=None)), 1)
    assert len(heads) == 1


@pytest.mark.parametrize("status", ["100 Continue", "102 Processing", "103 Early Hints"])
def test_interim_answers_are_no_answer(make, status):
    """RFC 9110, section 15.2: a client takes any number of them before the answer."""

    def answer(connection):
        while True:
            read_head(connection)
            connection.sendall(f"HTTP/1.1 {status}\r\nLink: </a>\r\n\r\n".encode() * 2)
            connection.sendall(b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\n\r\nok")

    with answering(answer) as url:
        sink = make(url=url, contentMode="Binary")
        assert sink.deliver(batch(message(1, data=None), message(2, data=None)), 1) == 2


def test_another_protocol_is_no_interim_answer(make):
    def answer(connection):
        read_head(connection)
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n")

    with answering(answer) as url, pytest.raises(TransientError, match="answered 101"):
        make(url=url).deliver(batch(message(1)), 1)


def test_what_is_no_http_is_told_briefly_and_without_the_token(make):
    def answer(connection):
        read_head(connection)
        connection.sendall(b"you sent s3cret" + b"!" * 5000 + b"\r\n\r\n")

    told = r"no HTTP answer; if it speaks TLS, write https in target.http.url: you sent \*\*\*!"
    with answering(answer) as url, pytest.raises(TransientError, match=told) as caught:
        make(url=url, keys={"token": "s3cret"}).deliver(batch(message(1)), 1)
    assert len(str(caught.value)) < 400
    assert caught.value.reason == "TargetUnavailable"


@pytest.mark.parametrize("size", ["no size", "-5"])
def test_behind_a_body_that_cannot_be_read_no_answer_is_looked_for(make, size):
    """What is left of it would be taken for the answer to the next message."""
    heads: list[int] = []

    def answer(connection):
        for number in range(2):
            read_head(connection)
            heads.append(number)
            connection.sendall(b"HTTP/1.1 202 Accepted\r\nTransfer-Encoding: chunked\r\n\r\n" + size.encode() + b"\r\n")

    with answering(answer) as url:
        sink = make(url=url, contentMode="Binary", parallelism=1)
        assert sink.deliver(batch(*(message(n, data=None) for n in range(3))), 1) == 3
    assert heads == [0, 0, 0]


@pytest.mark.parametrize("head", [b"Content-Type: text/event-stream", b"Transfer-Encoding: chunked"])
def test_an_answer_counts_although_its_body_does_not_end(make, head):
    """Else a receiver that took the message would get it again and again."""

    def answer(connection):
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n5\r\nhel")
        time.sleep(2)

    with answering(answer) as url:
        sink = make(url=url, requestTimeout="300ms")
        for number in (1, 2):
            assert sink.deliver(batch(message(number)), 1) == 1


@pytest.mark.parametrize("head", [b"Content-Length: 1000", b"Transfer-Encoding: chunked", b"Connection: close"])
def test_an_answer_counts_although_its_body_trickles(make, head):
    """A byte now and then is no silence: only delivery.timeout would end it, and what was taken come again."""

    def answer(connection):
        read_head(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        for _ in range(100):
            connection.sendall(b"1\r\nx\r\n")
            time.sleep(0.1)

    with answering(answer) as url:
        sink, began = make(url=url, requestTimeout="300ms"), time.monotonic()
        for number in (1, 2):
            assert sink.deliver(batch(message(number)), 1) == 1
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("head", ["Content-Length: {}", "Transfer-Encoding: chunked", "Connection: close"])
@pytest.mark.parametrize("size", [0, 1, 199, 65_535, 65_536, 65_537])
def test_what_follows_a_body_of_any_size_is_the_next_answer(make, head, size):
    def answer(connection):
        for _ in range(1 if "close" in head else 5):
            read_head(connection)
            chunks = (f"{size:x}\r\n{'x' * size}\r\n" if size else "") + "0\r\n\r\n"
            body = chunks if "chunked" in head else "x" * size
            connection.sendall(f"HTTP/1.1 202 Accepted\r\n{head.format(size)}\r\n\r\n{body}".encode())

    with answering(answer) as url:
        sink = make(url=url, contentMode="Binary", parallelism=1)
        assert sink.deliver(batch(*(message(n, data=None) for n in range(5))), 1) == 5
