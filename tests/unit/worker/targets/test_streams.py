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


ENCODER = StreamEncoder(processor_id="orders", pod="pod-0")
"""One for all messages: it keeps what it encoded."""
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACES: dict[str | None, dict[str, bytes]] = {None: {}, "{}": {}} | {
    f'{{"traceparent": "{PARENT}"{more}}}': {"traceparent": PARENT.encode()} | known
    for more, known in (("", {}), (', "tracestate": "shop=7"', {"tracestate": b"shop=7"}))
}


MESSAGES = st.builds(
    Message, st.just(8), st.just(15), TEXT, MAYBE, MAYBE, MAYBE, MAYBE, st.sampled_from(list(TRACES)),
    st.none() | st.datetimes(timezones=st.just(UTC)),
)  # fmt: skip


@given(MESSAGES, st.sampled_from([0, 1, 2**62]))
def test_any_message_is_read_back(sent, epoch):
    found = amqp_decoder(ENCODER.encode(sent, epoch))
    about, headers = found.properties, {k.decode(): v for k, v in found.application_properties.items()}
    assert about.message_id == sent.message_id.encode()
    assert about.subject == (None if sent.message_type is None else sent.message_type.encode())
    assert about.content_type == (None if sent.data is None else b"application/json")
    assert bytes(found.body) == (b"" if sent.data is None else sent.data.encode())
    at = sent.scheduled
    milliseconds = None if at is None else (at - datetime.fromtimestamp(0, UTC)).total_seconds() * 1000
    assert about.creation_time == (None if milliseconds is None else pytest.approx(milliseconds, abs=1.0))
    expected = {
        "x-outbox-processor": b"orders", "x-outbox-pod": b"pod-0", "x-outbox-epoch": epoch,
        "x-outbox-checkpoint": b"8:15",
    }  # fmt: skip
    if sent.publication_id is not None:
        expected["x-outbox-publication"] = sent.publication_id.encode()
    if sent.partition_key is not None:
        expected["x-outbox-partition-key"] = sent.partition_key.encode()
    if sent.data is None:
        expected["x-outbox-tombstone"] = True
    assert headers == expected | TRACES[sent.metadata]


@given(st.lists(st.tuples(st.integers(0, 2**63), st.binary(max_size=400)), max_size=5))
def test_what_is_published_is_read_back(entries):
    body = frames.publish(3, entries)
    assert int.from_bytes(body[:4], "big") == len(body) - 4
    theirs = schema.Publish(3, [schema.Message(number, None, data) for number, data in entries])
    assert bytes(encode_frame(theirs)).endswith(body[4:])


def test_a_request_is_read_back():
    ours = frames.frame(Key.QUERY_PUBLISHER_SEQUENCE, frames.U32.pack(9), frames.string("é"), frames.string("orders"))
    assert decode_frame(ours[4:]) == schema.QueryPublisherSequence(9, "é", "orders")


@pytest.mark.parametrize("body", [b"", b"\0\1", b"\0\1\0\2"])
def test_what_is_no_frame_is_not_read(body):
    with pytest.raises(frames.UnreadableError):
        frames.read_frame(body)


def test_a_frame_that_ends_too_early_is_not_read():
    with pytest.raises(frames.UnreadableError):
        frames.read_frame(b"\0\x10\0\1\0\x09abc").string()
    with pytest.raises(frames.UnreadableError):
        frames.read_frame(b"\0\3\0\1\1\0\0").number(frames.U64)
    with pytest.raises(frames.UnreadableError):
        frames.read_frame(b"\0\3\0\1" + b"\0\0\0\2" + 12 * b"\0").longs()


def test_codes_are_named():
    assert frames.describe_code(16) == "access refused"
    assert frames.describe_code(4711) == "code 4711"
