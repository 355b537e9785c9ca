"""Target `log` on an output that takes a part of what it is given, as one does where `PYTHONUNBUFFERED` is set."""

from __future__ import annotations

import io
import json
import sys

import pytest
from typing_extensions import override

from outbox_core.errors import TransientError
from outbox_core.message import Batch, Message
from outbox_core.progress.checkpoint import Checkpoint
from outbox_core.spec import LogTarget
from outbox_worker.targets.log import LogSink


class Output(io.RawIOBase):
    """Takes seven bytes at a time; then it has no room, and says so or takes nothing."""

    def __init__(self, room, *, says_so=True):
        self.taken, self.room, self.says_so = b"", room, says_so

    @override
    def writable(self):
        return True

    @override
    def write(self, data):
        if len(self.taken) >= self.room:
            if not self.says_so:
                return None
            raise OSError(28, "No space left on device")
        self.taken += bytes(data[:7])
        return len(data[:7])


@pytest.fixture
def deliver(monkeypatch):
    sink = LogSink(LogTarget(payload=True))

    def delivered(output, data="{}"):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding="utf-8", write_through=True))
        messages = tuple(
            Message(
                1, n, f"m-{n}", "t", publication_id="shop", partition_key="k", data=data, metadata=None, scheduled=None
            )
            for n in range(3)
        )
        batch = Batch(Checkpoint(0, 0), messages[-1].checkpoint, messages, len(messages), full=True)
        return sink.deliver(batch, 1)

    return delivered


def test_every_line_is_written_wholly(deliver):
    output = Output(room=10_000)
    assert deliver(output) == 3
    assert [json.loads(line)["messageId"] for line in output.taken.splitlines()] == ["m-0", "m-1", "m-2"]


def test_where_there_is_no_room_nothing_counts_as_delivered(deliver):
    with pytest.raises(TransientError, match=r"standard output cannot be written \(No space left on device\)"):
        deliver(Output(room=300))


def test_an_output_whose_reader_does_not_read_is_tried_again_later(deliver):
    with pytest.raises(TransientError, match="its reader does not read"):
        deliver(Output(room=300, says_so=False))


def test_after_half_a_line_what_is_tried_again_begins_a_line_of_its_own(deliver):
    output = Output(room=300)
    with pytest.raises(TransientError):
        deliver(output)
    cut = output.taken
    assert not cut.endswith(b"\n"), "the room ends in the middle of a line"
    output.room = 10_000
    deliver(output)
    deliver(output)
    again = output.taken.removeprefix(cut + b"\n").splitlines()
    assert [json.loads(line)["messageId"] for line in again] == 2 * ["m-0", "m-1", "m-2"]


def test_half_of_a_character_is_no_fault(deliver):
    assert deliver(Output(room=10_000), data=r'"\ud800"') == 3
