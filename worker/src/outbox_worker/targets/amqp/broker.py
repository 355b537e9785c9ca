"""Where the broker is and how to log in: read from a mounted Secret at every connect, so that a rotation works."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from typing_extensions import override

from outbox_worker.targets.secret_files import build_tls, invalid_secret, read_files

if TYPE_CHECKING:
    import ssl
    from pathlib import Path

    from outbox_core.errors import ConfigurationError

_SCHEMES: Final = {"amqp": 5672, "amqps": 5671}


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """A broker, a virtual host and who connects."""

    host: str
    port: int
    username: str
    password: str = field(repr=False)
    vhost: str
    tls: bool
    certificate_authority: str | None = field(repr=False, default=None)

    @override
    def __str__(self) -> str:
        """Where, without who: safe to print."""
        return f"{self.host}:{self.port}"

    def tls_context(self) -> ssl.SSLContext | None:
        """Build the TLS settings, or None for a plain connection.

        Raises:
            ConfigurationError: `ca.crt` is no certificate.

        """
        return build_tls(self.certificate_authority, "rabbitmq") if self.tls else None


def read_broker_address(directory: Path) -> BrokerAddress:
    """Read the keys of the target's Secret: `uri`, or `host`, `port`, `username`, `password`, `vhost`; and `ca.crt`.

    Raises:
        ConfigurationError: the Secret is missing or has not what is needed.

    """
    keys = ("uri", "host", "port", "username", "password", "vhost", "ca.crt")
    values = read_files(directory, *keys, target="rabbitmq")
    if uri := values["uri"]:
        return _from_uri(uri, values["ca.crt"])
    host = values["host"]
    if not host:
        raise _invalid(
            f"{directory} has no file `uri` and no file `host`; put amqp://user:password@host:5672/vhost into "
            "`uri`, or one value each into `host`, `port`, `username`, `password` and `vhost`"
        )
    tls = values["ca.crt"] is not None
    return BrokerAddress(
        host=host,
        port=_port(values["port"] or str(_SCHEMES["amqps" if tls else "amqp"])),
        username=values["username"] or "guest",
        password=values["password"] or "guest",
        vhost=values["vhost"] or "/",
        tls=tls,
        certificate_authority=values["ca.crt"],
    )


def _from_uri(uri: str, authority: str | None) -> BrokerAddress:
    try:
        parts = urlsplit(uri)
        port = parts.port
    except ValueError:
        # What cannot be read as a port may be a piece of the password.
        raise _invalid("`uri` is not a URI such as amqp://user:password@host:5672/vhost") from None
    if parts.scheme not in _SCHEMES or not parts.hostname:
        raise _invalid("`uri` must look like amqp://user:password@host:5672/vhost, or amqps://… for TLS")
    return BrokerAddress(
        host=parts.hostname,
        port=port or _SCHEMES[parts.scheme],
        username=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        vhost=unquote(parts.path[1:]) or "/",
        tls=parts.scheme == "amqps" or authority is not None,
        certificate_authority=authority,
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise _invalid("`port` is not a port number")
    return int(text)


def _invalid(what: str) -> ConfigurationError:
    return invalid_secret(what, "rabbitmq")
