"""A message as a CloudEvent over HTTP, its signature, and what an answer means."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from datetime import UTC, datetime
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.errors import HandlerError, TransientError
from outbox_core.message import Message
from outbox_core.spec import Target
from outbox_worker.targets.http import build_request, classify_answer, encode_header, parse_retry_after, sign

NOW = datetime(2026, 11, 23, 10, 0, tzinfo=UTC)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def message(**fields):
    chosen = {
        "message_id": "m-1", "message_type": "OrderPlaced", "publication_id": "shop", "partition_key": "order-7",
        "data": '{"cents": 1250}', "metadata": None, "scheduled": NOW,
    } | fields  # fmt: skip
    return Message(100, 7, **chosen)


def target(**fields):
    made = Target.model_validate({"http": {"url": "https://shop.test/events"} | fields}).http
    assert made is not None
    return made


def structured(**fields):
    headers, body = build_request(message(**fields), target())
    assert headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    return json.loads(body)


def binary(**fields):
    return build_request(message(**fields), target(contentMode="Binary"))


class TestStructured:
    def test_the_event_is_the_body(self):
        assert structured() == {
            "specversion": "1.0", "id": "m-1", "source": "/outbox/shop", "type": "OrderPlaced",
            "time": "2026-11-23T10:00:00+00:00", "partitionkey": "order-7", "datacontenttype": "application/json",
            "data": {"cents": 1250},
        }  # fmt: skip

    def test_the_payloads_own_text_is_sent(self):
        body = build_request(message(data='{"n": 12345678901234567890.10}'), target())[1]
        assert b'"data": {"n": 12345678901234567890.10}}' in body

    def test_an_integer_of_any_length_is_json(self):
        data = f'{{"n": {"7" * 9000}}}'
        headers, body = build_request(message(data=data), target(contentMode="Binary"))
        assert (headers["Content-Type"], body.decode()) == ("application/json", data)
        assert f'"data": {data}}}'.encode() in build_request(message(data=data), target())[1]

    def test_a_tombstone_has_no_data(self):
        assert not {"data", "datacontenttype"} & set(structured(data=None))

    @pytest.mark.parametrize("text", ["plain", '{"half":', "NaN", "[" * 100_000], ids=str.__len__)
    def test_what_is_not_json_is_a_string(self, text):
        event = structured(data=text)
        assert (event["data"], event["datacontenttype"]) == (text, "text/plain; charset=utf-8")


class TestBinary:
    def test_attributes_are_headers_and_the_data_is_the_body(self):
        headers, body = binary()
        assert body == b'{"cents": 1250}'
        assert headers == {
            "Idempotency-Key": "m-1", "Content-Type": "application/json", "ce-specversion": "1.0", "ce-id": "m-1",
            "ce-source": "/outbox/shop", "ce-type": "OrderPlaced", "ce-time": "2026-11-23T10:00:00+00:00",
            "ce-partitionkey": "order-7",
        }  # fmt: skip

    def test_a_tombstone_is_an_empty_body_without_a_type(self):
        headers, body = binary(data=None)
        assert body == b""
        assert "Content-Type" not in headers

    def test_the_specifications_example_of_percent_encoding(self):
        assert encode_header("Euro € 😀") == "Euro%20%E2%82%AC%20%F0%9F%98%80"
        assert encode_header('100% "~!/') == "100%25%20%22~!/"
        assert binary(partition_key="ключ\r\nX: y")[0]["ce-partitionkey"].endswith("%0D%0AX:%20y")

    @given(st.text(st.characters(exclude_categories=["Cs"])))
    def test_every_text_is_printable_ascii_and_comes_back(self, text):
        encoded = encode_header(text)
        assert encoded.isascii()
        assert all(0x21 <= ord(each) <= 0x7E and each != '"' for each in encoded)
        assert unquote(encoded) == text


class TestAttributes:
    def test_placeholders_of_source_and_type(self):
        chosen = target(source="https://shop.test/{publicationId}/{partitionKey}", type="shop.{messageType}.v1")
        event = json.loads(build_request(message(publication_id="a b/c"), chosen)[1])
        assert (event["source"], event["type"]) == ("https://shop.test/a%20b%2Fc/order-7", "shop.OrderPlaced.v1")

    def test_what_is_null_is_left_out(self):
        event = structured(partition_key=None, scheduled=None, publication_id=None)
        assert not {"partitionkey", "time"} & set(event)
        assert event["source"] == "/outbox/"

    def test_an_event_without_a_type_is_the_messages_fault(self):
        with pytest.raises(HandlerError, match="its type would be empty"):
            structured(message_type=None)
        assert json.loads(build_request(message(message_type=None), target(type="order"))[1])["type"] == "order"

    def test_the_key_names_the_message_and_nothing_else(self):
        first, again = build_request(message(), target())[0], build_request(message(data="{}"), target())[0]
        assert first["Idempotency-Key"] == again["Idempotency-Key"] == "m-1"


class TestTrace:
    def test_the_trace_that_is_stored_with_the_message_goes_out(self):
        metadata = json.dumps({"traceparent": TRACE, "tracestate": "shop=1", "user": "u"})
        headers, _ = binary(metadata=metadata)
        assert (headers["traceparent"], headers["tracestate"]) == (TRACE, "shop=1")
        assert headers["ce-traceparent"] == TRACE
        assert structured(metadata=metadata)["traceparent"] == TRACE

    @pytest.mark.parametrize(
        "metadata",
        [
            None, "{}", "traceparent", '["traceparent"]', '{"traceparent": 7}', '{"traceparent": "00-1"}',
            json.dumps({"traceparent": TRACE + "\r\nX: y"}), json.dumps({"tracestate": "traceparent"}),
        ],
    )  # fmt: skip
    def test_nothing_else_does(self, metadata):
        assert not {"traceparent", "tracestate"} & set(binary(metadata=metadata)[0])


class TestSignature:
    def test_it_is_that_of_standard_webhooks(self):
        # The example of the convention's own libraries.
        key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
        told = sign([key], "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
        assert told["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
        assert (told["webhook-id"], told["webhook-timestamp"]) == ("msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330")

    def test_each_key_signs_and_without_one_nothing_is_said(self):
        keys = [b"a" * 24, b"b" * 24]
        given_ = sign(keys, "m-1", 5, b"x")["webhook-signature"].split(" ")
        expected = [hmac.new(key, b"m-1.5.x", hashlib.sha256).digest() for key in keys]
        assert [base64.b64decode(each.removeprefix("v1,")) for each in given_] == expected
        assert sign([], "m-1", 5, b"x") == {}


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0), ("0", 0.0), ("Mon, 23 Nov 2026 10:02:00 GMT", 120.0), ("Mon, 23 Nov 2026 09:00:00 GMT", 0.0),
        ("Mon, 23 Nov 2026 10:02:00 -0000", 120.0), ("", None), ("soon", None), ("-5", None), ("1.5", None),
        ("Mon, 23 Nov 99999999999999999999 10:02:00 GMT", None),
    ],
)  # fmt: skip
def test_retry_after(value, seconds):
    assert parse_retry_after(value, NOW) == seconds


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_taken(status):
    assert classify_answer(status, None, "it answered") is None


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 413, 415, 422, 431, 451, 499])
def test_the_messages_fault(status):
    error = classify_answer(status, 3.0, "it answered")
    assert isinstance(error, HandlerError)
    assert (error.reason, error.error_class, error.retry_after) == ("MessageRejected", f"Http{status}", 3.0)


@pytest.mark.parametrize(
    ("status", "reason", "told"),
    [
        (408, "TargetUnavailable", "tried again"), (425, "TargetUnavailable", "tried again"),
        (429, "TargetUnavailable", "tried again"), (500, "TargetUnavailable", "tried again"),
        (503, "TargetUnavailable", "tried again"), (301, "TargetUnavailable", "redirects are not followed"),
        (307, "TargetUnavailable", "correct target.http.url"), (401, "AuthenticationFailed", "correct `token`"),
    ],
)  # fmt: skip
def test_the_targets_fault(status, reason, told):
    error = classify_answer(status, 3.0, "it answered")
    assert isinstance(error, TransientError)
    assert (error.reason, error.error_class, error.retry_after) == (reason, f"Http{status}", 3.0)
    assert told in str(error)
