"""Messages and frames of the stream protocol, read back by rstream, which shares nothing with them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rstream import amqp_decoder, schema
from rstream.encoding import decode_frame, encode_frame

from outbox_core.message import Message
from outbox_worker.targets.streams import frames
from outbox_worker.targets.streams.encoder import StreamEncoder
from outbox_worker.targets.streams.frames import Key

TEXT = st.text(st.characters(codec="utf-8"), max_size=300)
MAYBE = st.none() | TEXT


@given(TEXT, MAYBE, MAYBE, MAYBE, MAYBE, st.none() | st.datetimes(timezones=st.just(UTC)), st.integers(0, 2**62))
def test_any_message_is_read_back(message_id, kind, publication, key, data, at, epoch):
    encoder = StreamEncoder(processor_id="orders", pod="pod-0")
    sent = Message(8, 15, message_id, kind, publication, key, data, None, at)
    found = amqp_decoder(encoder.encode(sent, epoch))

    about, headers = found.properties, {k.decode(): v for k, v in found.application_properties.items()}
    assert about.message_id == message_id.encode()
    assert about.subject == (None if kind is None else kind.encode())
    assert about.content_type == (None if data is None else b"application/json")
    assert bytes(found.body) == (b"" if data is None else data.encode())
    milliseconds = None if at is None else (at - datetime.fromtimestamp(0, UTC)).total_seconds() * 1000
    assert about.creation_time == (None if milliseconds is None else pytest.approx(milliseconds, abs=1.0))
    expected = {
        "x-outbox-processor": b"orders", "x-outbox-pod": b"pod-0", "x-outbox-epoch": epoch,
        "x-outbox-checkpoint": b"8:15",
    }  # fmt: skip
    if publication is not None:
        expected["x-outbox-publication"] = publication.encode()
    if key is not None:
        expected["x-outbox-partition-key"] = key.encode()
    if data is None:
        expected["x-outbox-tombstone"] = True
    assert headers == expected


@given(st.lists(st.tuples(st.integers(0, 2**63), st.binary(max_size=400)), max_size=5))
def test_what_is_published_is_read_back(entries):
    body = frames.publish(3, entries)
    assert int.from_bytes(body[:4], "big") == len(body) - 4
    theirs = schema.Publish(3, [schema.Message(number, None, data) for number, data in entries])
    assert bytes(encode_frame(theirs)).endswith(body[4:])


def test_a_request_is_read_back():
    ours = frames.frame(Key.QUERY_PUBLISHER_SEQUENCE, frames.number(9), frames.string("é"), frames.string("orders"))
    assert decode_frame(ours[4:]) == schema.QueryPublisherSequence(9, "é", "orders")


@pytest.mark.parametrize("body", [b"", b"\0\1", b"\0\1\0\2"])
def test_what_is_no_frame_is_not_read(body):
    with pytest.raises(frames.UnreadableError):
        frames.read_frame(body)


def test_a_frame_that_ends_too_early_is_not_read():
    with pytest.raises(frames.UnreadableError):
        frames.read_frame(b"\0\x10\0\1\0\x09abc").string()
    with pytest.raises(frames.UnreadableError):
        frames.read_frame(b"\0\3\0\1\1\0\0").long()


def test_codes_are_named():
    assert frames.describe_code(16) == "access refused"
    assert frames.describe_code(4711) == "code 4711"
