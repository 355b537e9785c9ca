"""Where the brokers are and how to log in: read from a mounted Secret before every batch, so that a rotation works."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from outbox_worker.targets.secret_files import build_tls, invalid_secret, read_files

if TYPE_CHECKING:
    from pathlib import Path

LARGEST_MESSAGE: Final = 32 * 1024 * 1024
"""Bytes of the largest message that is sent at all. Brokers take 1 MiB where nothing else is set."""
ROUND_BYTES: Final = 900 * 1024
ROUND_MESSAGES: Final = 5000
"""So much is sent before its answers are awaited: less than the request that brokers take where nothing else is set."""
_QUEUE_KIBIBYTES: Final = 64 * 1024
"""Above the largest message: one that fits into no queue would wait without end."""
_KEYS: Final = ("bootstrapServers", "username", "password", "saslMechanism", "tls", "ca.crt")
_MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_invalid: Final = partial(invalid_secret, target="kafka")
_SERVER: Final = r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):\d{1,5}"


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Brokers, and who connects to them."""

    servers: str
    tls: bool
    username: str | None = None
    password: str | None = field(repr=False, default=None)
    mechanism: str = "PLAIN"
    authority: str | None = field(repr=False, default=None)

    def as_producer(self, client: str) -> dict[str, Any]:
        """Build the settings of a producer that calls itself `client`."""
        return _PRODUCER | self.as_client(client)

    def as_client(self, client: str) -> dict[str, Any]:
        """Build the settings of any client: how it connects."""
        config: dict[str, Any] = _CLIENT | {"bootstrap.servers": self.servers, "client.id": client}
        protocol = "ssl" if self.tls else "plaintext"
        if self.authority is not None:
            config["ssl.ca.pem"] = self.authority
        elif self.tls:
            config["ssl.ca.location"] = "probe"  # where this system keeps what it trusts
        if self.username is not None:
            protocol = f"sasl_{protocol}"
            config["sasl.mechanisms"] = self.mechanism
            config["sasl.username"], config["sasl.password"] = self.username, self.password
        return config | {"security.protocol": protocol}


_CLIENT: Final[dict[str, Any]] = {
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
    "log.connection.close": False,
}
_PRODUCER: Final[dict[str, Any]] = {
    "enable.idempotence": True,
    "acks": "all",
    # No message times out for itself: a later one of its key could get through. delivery.timeout is for the batch.
    "message.timeout.ms": 0,
    # All of a round goes at once, when it is awaited (flush does not linger), however long it takes to hand it over:
    # each partition gets one request, and takes or refuses all of it. This is the most that librdkafka allows.
    "linger.ms": 900_000,
    "batch.size": 1024 * 1024,
    "batch.num.messages": 2 * ROUND_MESSAGES,
    "compression.type": "lz4",
    "delivery.report.only.error": True,
    # As producers in Java: a key is in the partition where consumers of several topics expect it.
    "partitioner": "murmur2_random",
    "message.max.bytes": LARGEST_MESSAGE,
    "queue.buffering.max.messages": 100_000,
    "queue.buffering.max.kbytes": _QUEUE_KIBIBYTES,
    "topic.metadata.propagation.max.ms": 5000,
}


def read_broker_settings(directory: Path) -> BrokerSettings:
    """Read the keys of the target's Secret.

    Raises:
        ConfigurationError: the Secret is missing or has not what is needed.

    """
    values = read_files(directory, *_KEYS, target="kafka")
    servers = re.sub(r"\s+", "", values["bootstrapServers"] or "")
    if not all(re.fullmatch(_SERVER, each) for each in servers.split(",")):
        raise _invalid("`bootstrapServers` must hold host:port, or several of them with commas between")
    username, password, authority = values["username"], values["password"], values["ca.crt"]
    if (username is None) != (password is None):
        raise _invalid("`username` and `password` belong together: set both, or none for brokers that ask for no login")
    mechanism = values["saslMechanism"] or "PLAIN"
    if mechanism not in _MECHANISMS:
        raise _invalid(f"`saslMechanism` must be one of {', '.join(_MECHANISMS)}")
    if username is None and values["saslMechanism"] is not None:
        raise _invalid("`saslMechanism` needs `username` and `password`")
    if values["tls"] not in (None, "true", "false"):
        raise _invalid("`tls` must be true or false")
    if authority is not None:
        if values["tls"] == "false":
            raise _invalid("`ca.crt` is for TLS, and `tls` is false: take one of them away")
        build_tls(authority, "kafka")
    tls = authority is not None or values["tls"] == "true"
    return BrokerSettings(servers, tls, username, password, mechanism, authority)
