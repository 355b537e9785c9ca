"""The files of a mounted Secret of a target outside the database: read again and again, so that a rotation works."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from pathlib import Path


def read_files(directory: Path, *names: str, target: str) -> dict[str, str | None]:
    """Read these files, without space around their text; None: it is not there, or empty.

    Raises:
        ConfigurationError: the folder is missing, a file of it cannot be read, or it has `user` where `username` is
            read: without an error another user would log in, or none.

    """
    if not directory.is_dir():
        raise invalid_secret(f"there is no folder {directory}; name one that holds the files of a connection", target)
    values = {name: _read(directory / name, target) for name in names}
    file = directory / "user"
    needs_user = "username" in values and not values["username"] and not values.get("uri")
    if needs_user and file.is_file() and _read(file, target):
        raise invalid_secret(
            f"{directory.resolve()} has a file `user`, which is the key of a database; rename `user` to `username`",
            target,
        )
    return values


def _read(path: Path, target: str) -> str | None:
    try:
        return path.read_text(encoding="utf-8-sig").strip() or None
    except FileNotFoundError:
        return None
    except OSError as err:
        raise invalid_secret(f"its key `{path.name}` cannot be read ({err.strerror})", target) from err
    except UnicodeDecodeError as err:
        raise invalid_secret(f"its key `{path.name}` is not text in UTF-8", target) from err


def build_tls(authority: str | None, target: str) -> ssl.SSLContext:
    """Build TLS settings that trust this authority alone; None: those that the system trusts.

    Raises:
        ConfigurationError: it is no certificate.

    """
    try:
        return ssl.create_default_context(cadata=authority)
    except (ssl.SSLError, ValueError) as err:
        raise invalid_secret("`ca.crt` holds no PEM certificate", target) from err


def invalid_secret(what: str, target: str) -> ConfigurationError:
    """Say what is wrong with the Secret of a target."""
    return ConfigurationError(
        f"the Secret of target.{target}.connection cannot be used: {what}", reason=Reason.CONNECTION_SECRET_INVALID
    )
