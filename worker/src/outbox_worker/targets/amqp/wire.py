"""A socket to RabbitMQ on which one thread writes while it reads, whichever of the broker's protocols is spoken."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, Final

from outbox_worker.targets.amqp.broker import build_unavailable, open_socket
from outbox_worker.waiting import wait_ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_core.errors import TransientError
    from outbox_worker.targets.amqp.broker import BrokerAddress

CONNECT_SECONDS: Final = 10.0
HEARTBEAT_SECONDS: Final = 60
_SEND_PIECE: Final = 262_144


class Wire:
    """An open socket. After any error it is closed: what was not confirmed has to be sent again anyway."""

    def __init__(self, address: BrokerAddress, *, beat: bytes, take: Callable[[bytes], int]) -> None:
        """Connect; `beat` is the frame of a heartbeat.

        `take` takes the whole frames with which what arrived begins, and returns how many bytes these are; it raises
        what the broker says in them.

        Raises:
            TransientError: the broker cannot be reached.
            ConfigurationError: its certificate is not trusted.

        """
        self.address = address
        self.heartbeat = float(HEARTBEAT_SECONDS)
        """The broker is given up after twice as long without a word of it."""
        self._beat_frame = memoryview(beat)
        self._take = take
        self._received = bytearray()
        self._last_sent = self._last_received = time.monotonic()
        self._is_cut_off = False
        """What was written may end within a frame."""
        self._socket = open_socket(address, CONNECT_SECONDS)

    def exchange(
        self,
        data: bytes,
        deadline: float,
        is_done: Callable[[], bool],
        check: Callable[[float], None] | None = None,
    ) -> None:
        """Write all of the data, reading meanwhile; then go on reading until it is done.

        `is_done` is asked when everything is written, after each look at what arrived; `check` is told the monotonic
        time before each wait, and raises what makes waiting pointless.

        Raises:
            OutboxError: the broker refused, closed, or did not answer before the deadline.

        """
        view = memoryview(data)
        while True:
            self._receive()
            now = time.monotonic()
            if not view and now - self._last_sent > self.heartbeat / 3:
                # Its rest goes first: what TLS could not send it keeps, and then counts as sent of what comes next.
                view = self._beat_frame[self._send(self._beat_frame) :]
            self._is_cut_off = bool(view)
            if not view and is_done():
                return
            if check is not None:
                check(now)
            if now > deadline:
                raise self.unavailable("did not answer in time; it may be blocked by its alarms (disk, memory)")
            if now - self._last_received > 2 * self.heartbeat:
                raise self.unavailable("is silent, heartbeats are missing")
            wait_ready(0.2, [self._socket], [self._socket] if view else [])
            if view:  # it takes nothing where it is not ready
                view = view[self._send(view[:_SEND_PIECE]) :]

    def close(self, last: bytes = b"") -> None:
        """Close, after these last bytes if sending them needs no waiting. Never raises.

        Behind a frame that is cut off they would be taken for its end.
        """
        try:
            if last and not self._is_cut_off:
                self._socket.send(last)
        except (OSError, ValueError):
            pass  # it is gone already
        finally:
            self._socket.close()

    def unavailable(self, what: str) -> TransientError:
        """Say what keeps the broker from being used now."""
        return build_unavailable(self.address, what)

    def _send(self, piece: memoryview) -> int:
        try:
            sent = self._socket.send(piece)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0
        except OSError as err:
            self._receive()  # the broker's own words, if it said any before it closed
            raise self.unavailable(f"broke the connection ({err.strerror or err})") from err
        self._last_sent = time.monotonic()
        return sent

    def _receive(self) -> None:
        """Take all that has arrived.

        An answer before the end counts: the broker says "no such virtual host" and closes, and a process that reads
        late finds both. Only a call that finds nothing but the end raises.
        """
        took = False
        while True:
            try:
                data = self._socket.recv(65536)
                ended = None if data else "closed the connection"
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as err:
                data, ended = b"", f"broke the connection ({err.strerror or err})"
            if ended and took:
                return
            if ended:
                raise self.unavailable(ended)
            took = True
            self._last_received = time.monotonic()
            self._received += data
            del self._received[: self._take(bytes(self._received))]
