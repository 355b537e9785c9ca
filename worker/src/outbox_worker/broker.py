"""Where the broker is and how to log in: read from a mounted Secret at every connect, so that a rotation works."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from typing_extensions import override

from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from pathlib import Path

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
        if not self.tls:
            return None
        try:
            return ssl.create_default_context(cadata=self.certificate_authority)
        except (ssl.SSLError, ValueError) as err:
            raise _invalid("`ca.crt` holds no PEM certificate") from err


def read_broker_address(directory: Path) -> BrokerAddress:
    """Read the keys of the target's Secret: `uri`, or `host`, `port`, `username`, `password`, `vhost`; and `ca.crt`.

    Raises:
        ConfigurationError: the Secret is missing or has not what is needed.

    """
    values = {key: _read(directory / key) for key in ("uri", "host", "port", "username", "password", "vhost", "ca.crt")}
    if uri := values["uri"]:
        return _from_uri(uri, values["ca.crt"])
    host = values["host"]
    if not host:
        raise _invalid(
            f"there is no folder {directory}; name one that holds the files of a connection"
            if not directory.is_dir()
            else f"{directory} has no file `uri` and no file `host`; put amqp://user:password@host:5672/vhost into "
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
    except ValueError as err:
        raise _invalid("`uri` is not a URI such as amqp://user:password@host:5672/vhost") from err
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


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as err:
        raise _invalid(f"its key `{path.name}` cannot be read") from err


def _invalid(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the Secret of target.rabbitmq.connection cannot be used: {what}", reason=Reason.CONNECTION_SECRET_INVALID
    )
