"""One connection and channel to RabbitMQ, in confirm mode, over a plain socket. The frames are pamqp's.

Made for one thing: write a whole batch at once while reading what the broker says, and return when every message is
answered for. One thread uses it. After any error it is closed and a new one is made: nothing is resumed, because what
was not confirmed has to be sent again anyway.
"""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pamqp import commands, exceptions, frame, header, heartbeat

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, TransientError
from outbox_core.report import Reason
from outbox_worker.targets.amqp.broker import build_login_refused, build_vhost_refused
from outbox_worker.targets.amqp.encoder import CHANNEL, PLACE
from outbox_worker.targets.amqp.wire import CONNECT_SECONDS, HEARTBEAT_SECONDS, Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Container

    from outbox_worker.targets.amqp.broker import BrokerAddress

_FRAME_MAX: Final = 131_072
_BLOCKED_PATIENCE: Final = 10.0
"""How long a batch waits for a broker that blocks publishers (disk or memory alarm) before it says so in status."""
_FRAME: Final = struct.Struct(">BHI")
_ACK_FRAME: Final = struct.Struct(">BHIHHQBB")
_ACK: Final = (1, CHANNEL, 13, 60, 80)
"""A method's frame, its channel and length, and `basic.ack`."""
_FRAME_END: Final = 0xCE
_CAPABILITIES: Final[dict[str, Any]] = {
    "publisher_confirms": True,
    "basic.nack": True,
    "connection.blocked": True,
    "authentication_failure_close": True,
}
_Method = TypeVar("_Method")


@dataclass(frozen=True, slots=True)
class Returned:
    """A mandatory message that no queue took."""

    reply: str
    exchange: str
    routing_key: str
    place: str | None
    """As it was published; None: the broker does not give headers back."""


def read_ack(data: bytes, start: int, end: int) -> tuple[int, bool] | None:
    """Read a frame that is an ack, which the library takes 3 us for: its tag, and whether it is for all before it too.

    None: it is another frame.
    """
    if end - start != _ACK_FRAME.size:
        return None
    *begins, tag, bits, ends = _ACK_FRAME.unpack_from(data, start)
    return (tag, bool(bits & 1)) if tuple(begins) == _ACK and ends == _FRAME_END else None


@dataclass(slots=True)
class ConfirmTracker:
    """Publisher confirms of one channel: every tag is answered once, alone or in a `multiple` up to a tag."""

    last: int = 0
    """The latest tag given out."""
    _lowest: int = 1
    """Every tag below is answered."""
    _answered: set[int] = field(default_factory=set)
    """Answered ones from `_lowest` on."""
    nacked: list[int] = field(default_factory=list)
    """Tags that the broker refused, until `forget_nacked`."""

    def publish(self, count: int) -> int:
        """Give out the tags of the next messages; return the first."""
        self.last += count
        return self.last - count + 1

    def are_answered(self, last: int) -> bool:
        """Say whether every tag up to this one is answered."""
        return last < self._lowest

    def is_accepted(self, tag: int) -> bool:
        """Say whether the broker acknowledged this tag. Not after `forget_nacked`."""
        return (tag < self._lowest or tag in self._answered) and tag not in self.nacked

    def answer(self, tag: int, *, multiple: bool, accepted: bool) -> None:
        """Take an ack or nack; 0 with `multiple` means all.

        Raises:
            ValueError: a tag that was never given out: the two sides do not talk about the same channel.

        """
        top = self.last if multiple and tag == 0 else tag
        if not 0 < top <= self.last:
            msg = f"the broker confirmed delivery tag {tag}; the last one published is {self.last}"
            raise ValueError(msg)
        tags = range(self._lowest if multiple else max(top, self._lowest), top + 1)
        if not accepted:
            self.nacked += (each for each in tags if each not in self._answered)
        if tags.start == self._lowest:  # all up to there: no set is needed for them
            self._answered.difference_update(tags if self._answered else ())
            self._lowest = max(self._lowest, top + 1)
        else:
            self._answered.update(tags)
        while self._lowest in self._answered:
            self._answered.remove(self._lowest)
            self._lowest += 1

    def forget_nacked(self, tags: Container[int]) -> None:
        """Forget which of these tags were refused: it is written down elsewhere."""
        self.nacked = [tag for tag in self.nacked if tag not in tags]


class AmqpConnection:
    """An open channel in confirm mode."""

    def __init__(self, address: BrokerAddress, *, name: str) -> None:
        """Connect, log in and switch confirms on.

        Raises:
            TransientError: the broker cannot be reached, or refuses the login.
            ConfigurationError: virtual host or TLS settings are wrong.

        """
        self._address = address
        self._inbox: list[Any] = []
        self.frame_max = _FRAME_MAX
        self.blocked: str | None = None
        self._blocked_since = 0.0
        self.confirms = ConfirmTracker()
        self.returned: list[Returned] = []
        self._returning: commands.Basic.Return | None = None
        self._wire = Wire(address, beat=heartbeat.Heartbeat().marshal(), take=self._take_frames)
        try:
            self._log_in(name)
        except BaseException:
            self._wire.close()
            raise

    def _log_in(self, name: str) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        login = f"\0{self._address.username}\0{self._address.password}"
        self._exchange(header.ProtocolHeader().marshal(), deadline)
        self._call(None, commands.Connection.Start, deadline, channel=0)
        properties: dict[str, Any] = {
            "product": "outbox-operator",
            "connection_name": name,
            "capabilities": _CAPABILITIES,
        }
        start = commands.Connection.StartOk(client_properties=properties, mechanism="PLAIN", response=login)
        tune = self._call(start, commands.Connection.Tune, deadline, channel=0)
        self.frame_max = min(tune.frame_max or _FRAME_MAX, _FRAME_MAX)
        seconds = min(tune.heartbeat or HEARTBEAT_SECONDS, HEARTBEAT_SECONDS)
        self._wire.heartbeat = float(seconds)
        tuned = commands.Connection.TuneOk(channel_max=CHANNEL, frame_max=self.frame_max, heartbeat=seconds)
        self._exchange(frame.marshal(tuned, 0), deadline)
        opening = commands.Connection.Open(virtual_host=self._address.vhost)
        self._call(opening, commands.Connection.OpenOk, deadline, channel=0)
        self._call(commands.Channel.Open(), commands.Channel.OpenOk, deadline, channel=CHANNEL)
        self._call(commands.Confirm.Select(), commands.Confirm.SelectOk, deadline, channel=CHANNEL)

    def _call(self, method: Any, answer: type[_Method], deadline: float, *, channel: int) -> _Method:
        data = frame.marshal(method, channel) if method is not None else b""
        self._exchange(data, deadline, lambda: any(isinstance(each, answer) for each in self._inbox))
        found = next(each for each in self._inbox if isinstance(each, answer))
        self._inbox.clear()
        return found

    def publish(self, data: bytes, *, deadline: float) -> None:
        """Write frames of messages (their tags were taken from `confirms`) and take what the broker says meanwhile."""
        self._exchange(data, deadline)

    def await_confirms(self, last: int, *, deadline: float) -> None:
        """Return when every message published up to this delivery tag is answered for."""
        self._exchange(b"", deadline, lambda: self.confirms.are_answered(last))

    def keep_alive(self) -> None:
        """Send and take heartbeats; call it every few seconds while idle.

        Raises:
            OutboxError: the broker closed the connection or is silent.

        """
        self._exchange(b"", time.monotonic() + CONNECT_SECONDS)

    def close(self) -> None:
        """Say good-bye if that needs no waiting, and close. Never raises."""
        closing = commands.Connection.Close(reply_code=200, reply_text="", class_id=0, method_id=0)
        self._wire.close(frame.marshal(closing, 0))

    def _exchange(self, data: bytes, deadline: float, is_done: Callable[[], bool] = lambda: True) -> None:
        """Write all of the data while reading; then go on reading until it is done, or publishers are blocked."""
        began = time.monotonic()
        patience = min(_BLOCKED_PATIENCE, (deadline - began) / 2)  # before delivery.timeout ends the batch

        def check(now: float) -> None:
            if self.blocked is not None and now - max(began, self._blocked_since) > patience:
                raise self._wire.unavailable(f"blocks publishers ({self.blocked}); free its disk or memory")

        self._wire.exchange(data, deadline, is_done, check)

    def _take_frames(self, view: bytes) -> int:
        start = 0
        while len(view) - start >= _FRAME.size:
            if view.startswith(b"AMQP", start):
                raise self._wire.unavailable("does not speak AMQP 0-9-1")
            _, _, size = _FRAME.unpack_from(view, start)
            end = start + _FRAME.size + size + 1
            if len(view) < end:
                break
            if (ack := read_ack(view, start, end)) is not None:
                self.confirms.answer(ack[0], multiple=ack[1], accepted=True)
                start = end
                continue
            try:
                _, _, value = frame.unmarshal(view[start:end])
            except exceptions.UnmarshalingException as err:
                raise self._wire.unavailable("sent a frame that cannot be read") from err
            start = end
            self._dispatch(value)
        return start

    def _dispatch(self, value: Any) -> None:
        match value:
            case commands.Basic.Nack():
                self.confirms.answer(value.delivery_tag, multiple=value.multiple, accepted=False)
            case commands.Basic.Return():
                self._returning = value  # which message it was, its header says: the next frame
            case header.ContentHeader() if self._returning is not None:
                self._take_returned(self._returning, value)
            case commands.Connection.Blocked():
                self.blocked, self._blocked_since = value.reason, time.monotonic()
            case commands.Connection.Unblocked():
                self.blocked = None
            case commands.Connection.Close():
                raise self._closed_by_broker(value.reply_code or 0, value.reply_text)
            case commands.Channel.Close():
                raise self._channel_closed(value.reply_code or 0, value.reply_text)
            case _:
                self._inbox.append(value)
                del self._inbox[:-8]  # contents of returned messages are not kept

    def _take_returned(self, method: commands.Basic.Return, content: header.ContentHeader) -> None:
        self._returning = None
        reply = f"{method.reply_code} {method.reply_text}"
        place = (content.properties.headers or {}).get(PLACE)
        place = None if place is None else str(place)
        self.returned.append(Returned(reply, method.exchange, method.routing_key or "", place))

    def _closed_by_broker(self, code: int, text: str) -> OutboxError:
        if code == 403:
            return build_login_refused(self._address)
        if code == 530:
            return build_vhost_refused(self._address, f" ({text})")
        return self._wire.unavailable(f"closed the connection ({code} {text})")

    def _channel_closed(self, code: int, text: str) -> OutboxError:
        if code == 404:
            return TransientError(
                f"RabbitMQ at {self._address}: {text}; declare the exchange, or correct target.rabbitmq.exchange",
                reason=Reason.MESSAGE_UNROUTABLE,
            )
        if code == 403:
            return ConfigurationError(
                f"RabbitMQ at {self._address}: {text}; grant the user write permission",
                reason=Reason.PERMISSION_DENIED,
            )
        if code in (311, 406):
            return HandlerError(f"RabbitMQ at {self._address}: {text}", reason=Reason.MESSAGE_REJECTED)
        return self._wire.unavailable(f"closed the channel ({code} {text})")
