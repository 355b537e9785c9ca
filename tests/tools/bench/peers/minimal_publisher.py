"""Reads the outbox by position, publishes to RabbitMQ with confirms, stores how far it came. Nothing else.

No lease, no second owner, no failing messages, no transactions that commit late: what the product adds costs the
difference to this.
"""

from __future__ import annotations

import argparse
import struct
import time
from typing import Any

import psycopg
from pamqp import commands, frame, header

from tests.tools.ledger.amqp import Broker

_CHANNEL = 1
_HEADER = struct.Struct(">BHI")
_ACK = struct.Struct(">HHQB")
_FETCH = "SELECT position, message_id, data::text FROM outbox.messages WHERE position > %s ORDER BY position LIMIT %s"
_STORE = "UPDATE minimal_checkpoints SET position = %s WHERE name = %s"


class Confirms:
    """Up to which delivery tag everything is confirmed."""

    def __init__(self) -> None:
        self.low = 0
        self._ahead: set[int] = set()

    def take(self, class_id: int, method_id: int, tag: int, multiple: int) -> None:
        """Take a frame of the broker, which must be a confirm."""
        if (class_id, method_id) != (60, 80):
            raise ConnectionError(f"the broker answered {class_id}.{method_id}, not a confirm")
        if not multiple:
            self._ahead.add(tag)
        elif tag > self.low:
            self._ahead.difference_update(range(self.low + 1, tag + 1))
            self.low = tag
        while self.low + 1 in self._ahead:
            self._ahead.remove(self.low + 1)
            self.low += 1


class Publisher:
    """One connection in confirm mode."""

    def __init__(self, port: int, queue: str) -> None:
        self._broker = Broker("127.0.0.1", port, "tests", "s3cret word")
        self._broker._call(commands.Confirm.Select(), commands.Confirm.SelectOk)
        self._socket = self._broker._socket
        self._publish = frame.marshal(commands.Basic.Publish(routing_key=queue), _CHANNEL)
        self._buffer = bytearray()
        self._sent = 0
        self._confirms = Confirms()

    def publish(self, rows: list[tuple[Any, ...]]) -> None:
        """Write all of them at once, and return when all are confirmed."""
        out = bytearray()
        for _, message_id, data in rows:
            body = data.encode()
            out += self._publish
            out += _properties(message_id, len(body))
            out += _HEADER.pack(3, _CHANNEL, len(body)) + body + b"\xce"
        self._sent += len(rows)
        self._socket.sendall(out)
        while self._confirms.low < self._sent:
            self._take(self._socket.recv(1 << 16))

    def _take(self, received: bytes) -> None:
        if not received:
            raise ConnectionError("the broker hung up")
        self._buffer += received
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            kind, _, size = _HEADER.unpack_from(self._buffer, at)
            if len(self._buffer) - at < _HEADER.size + size + 1:
                break
            if kind == 1:
                self._confirms.take(*_ACK.unpack_from(self._buffer, at + _HEADER.size))
            at += _HEADER.size + size + 1
        del self._buffer[:at]


def _properties(message_id: str, size: int) -> bytes:
    """Frame of the header: content type, delivery mode 2, message id, type."""
    short = message_id.encode()
    payload = b"".join(
        (
            struct.pack(">HHQH", 60, 0, size, 0x8000 | 0x1000 | 0x0080 | 0x0020),
            b"\x10application/json\x02",
            bytes([len(short)]), short, b"\x0bOrderPlaced",
        )
    )  # fmt: skip
    return _HEADER.pack(2, _CHANNEL, len(payload)) + payload + b"\xce"


def check_properties() -> None:
    """The library must read the frame as it was meant."""
    read = frame.unmarshal(_properties("m-1", 5))[2]
    assert isinstance(read, header.ContentHeader)
    found = read.properties
    assert (found.message_id, found.message_type, found.delivery_mode) == ("m-1", "OrderPlaced", 2)


def main() -> None:
    """Work until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--listen", action="store_true", help="wait for a NOTIFY on `bench`, not for 10 ms")
    given = parser.parse_args()
    check_properties()
    connection = psycopg.connect(given.database, autocommit=True)
    connection.execute("CREATE TABLE IF NOT EXISTS minimal_checkpoints (name text PRIMARY KEY, position bigint)")
    connection.execute("INSERT INTO minimal_checkpoints VALUES (%s, 0) ON CONFLICT DO NOTHING", (given.queue,))
    if given.listen:
        connection.execute("LISTEN bench")
    publisher = Publisher(given.port, given.queue)
    stored = 0
    print("ready", flush=True)
    while True:
        rows = connection.execute(_FETCH, (stored, given.batch), prepare=True).fetchall()
        if rows:
            publisher.publish(rows)
            stored = rows[-1][0]
            connection.execute(_STORE, (stored, given.queue), prepare=True)
        elif given.listen:
            for _ in connection.notifies(timeout=0.5, stop_after=1):
                pass
        else:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
