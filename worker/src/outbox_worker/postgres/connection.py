"""Opens connections from a directory of files, as a mounted Secret is one. Read again at every connect: rotation works.

Works through PgBouncer in transaction mode: no prepared statements, nothing in `options`, and no session settings but
those that it keeps for each of its clients (`client_encoding`, `DateStyle`).
"""

from __future__ import annotations

import re
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import psycopg
from psycopg import conninfo, pq, sql

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.report import Reason
from outbox_worker.postgres.errors import translate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

Connection: TypeAlias = psycopg.Connection[Any]
"""An open session, as the rest of the worker knows it."""

IDLE_SECONDS: Final = 5.0
"""For which a transaction of `limited` may wait for this process: a handler in C may keep all threads from running."""
_PARAMETERS: Final = re.compile(r"\?\w+=")
ENCODE: Final = "a user or password has @ or / in it: write %40 for @ and %2F for /"
"""What to do about a URI that `is_misread`."""
# A peer that vanished is noticed within about 25 s when idle, 30 s when it owes us an answer.
_LIVENESS: Final = {
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
    "connect_timeout": 10,
}
_NO_URI: Final = (
    "`uri` is not postgresql://user:password@host:port/database, or has behind `?` a parameter that libpq does not know"
)
_KEYS: Final = {
    "host": "host",
    "port": "port",
    "database": "dbname",
    "user": "user",
    "password": "password",
    "sslmode": "sslmode",
}
_NEEDED: Final = ("user", "database")
"""Keys without which libpq takes the name of the operating system's user."""
_SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")


@dataclass(frozen=True, slots=True)
class ConnectionFiles:
    """A directory with `uri`, or `host`, `port`, `database`, `user`, `password`; optional `sslmode`, `ca.crt`."""

    directory: Path
    secret: str = ""
    """Name of the Secret that is mounted there, for people; none: a person chose the directory."""

    def connect(self, application_name: str) -> Connection:
        """Open an autocommit connection that names itself to the server.

        Raises:
            ConfigurationError: `ConnectionSecretInvalid`: files are missing or make no sense.
            TransientError: `DatabaseUnavailable` or `AuthenticationFailed`.

        """
        unreadable = self._invalid("libpq does not understand the connection's parameters")
        return _open(self._parameters(), application_name, unreadable)

    def _parameters(self) -> dict[str, Any]:
        uri = self._read("uri")
        parameters: dict[str, Any] = {}
        if uri is not None:
            if is_misread(uri):
                raise self._invalid(f"in `uri` {ENCODE}")
            try:
                parameters = conninfo.conninfo_to_dict(uri)
            except psycopg.ProgrammingError:
                raise self._invalid(_NO_URI) from None
        else:
            self._refuse_incomplete()
        for key, name in _KEYS.items():
            value = self._read(key)
            if value is not None and (uri is None or key == "sslmode"):
                parameters[name] = value
        if parameters.get("sslmode", "prefer") not in _SSL_MODES:
            raise self._invalid(f"`sslmode` is none of {', '.join(_SSL_MODES)}")
        if not str(parameters.get("port", "5432")).replace(",", "").isdecimal():
            raise self._invalid("`port` is not a number")
        if self._read("ca.crt") is not None:
            parameters["sslrootcert"] = str(self.directory / "ca.crt")
            # libpq's own default would go on without TLS where the certificate is wrong or there is none.
            parameters.setdefault("sslmode", "verify-full")
        return parameters

    def _refuse_incomplete(self) -> None:
        if self._read("host") is None:
            raise self._invalid(
                "there is no such folder; name one that holds the files of a connection"
                if not self.directory.is_dir()
                else "it has no file `uri` and no file `host`; put postgresql://user:password@host:5432/database into "
                "`uri`, or one value each into `host`, `port`, `database`, `user` and `password`"
            )
        if missing := [key for key in _NEEDED if self._read(key) is None]:
            raise self._invalid(
                f"it has `host` and {' and '.join(f'no `{key}`' for key in missing)}; put one value each into `host`, "
                "`port`, `database`, `user` and `password`: other names of keys are not read"
            )

    def _read(self, key: str) -> str | None:
        try:
            return (self.directory / key).read_text(encoding="utf-8-sig").strip() or None
        except FileNotFoundError:
            return None
        except OSError as err:
            raise self._invalid(f"its key `{key}` cannot be read ({err.strerror})") from err
        except UnicodeDecodeError as err:
            raise self._invalid(f"its key `{key}` is not text in UTF-8") from err

    def _invalid(self, what: str) -> ConfigurationError:
        place = self.directory.resolve()  # with `outbox run` it is a link to the folder that a person named
        where = f"the Secret {self.secret}, mounted at {place}," if self.secret else f"{place}"
        return _invalid(f"{where} is not a database connection: {what}")


def is_misread(uri: str) -> bool:
    """Say whether libpq would take a part of a password for the host's name, which its errors show.

    It ends user and password at the first `@`, and looks for none behind a `/`: both must be percent-encoded
    (PostgreSQL documentation, 32.1.1.2 Connection URIs).
    """
    place = _PARAMETERS.split(uri.partition("://")[2], maxsplit=1)[0]
    return "@" in "".join(re.split("[@/]", place, maxsplit=1)[1:])


def connect_uri(file: Path, application_name: str) -> Connection:
    """Open an autocommit connection by a file that holds a URI, for people at a terminal.

    Raises:
        ConfigurationError: `ConnectionSecretInvalid`.
        TransientError: `DatabaseUnavailable` or `AuthenticationFailed`.

    """
    unreadable = _invalid(f"{file} holds no connection URI (postgresql://user:password@host:port/database)")
    try:
        uri = file.read_text(encoding="utf-8-sig").strip()
        if is_misread(uri):
            raise _invalid(f"in {file} {ENCODE}")
        parameters = conninfo.conninfo_to_dict(uri)
    except FileNotFoundError:
        raise _invalid(
            f"there is no file {file}: name one that holds postgresql://user:password@host:port/database"
        ) from None
    except (OSError, UnicodeDecodeError, psycopg.ProgrammingError):
        raise unreadable from None
    return _open(parameters, application_name, unreadable)


def connect_environment(application_name: str) -> Connection:
    """Open an autocommit connection by libpq's variables (PGSERVICE, PGHOST, PGPASSFILE …), for people at a terminal.

    Raises:
        ConfigurationError: `ConnectionSecretInvalid`: no such service, or a variable makes no sense.
        TransientError: `DatabaseUnavailable` or `AuthenticationFailed`.

    """
    unreadable = _invalid("libpq does not understand what the environment says (PGSERVICE, PGHOST …)")
    return _open({}, application_name, unreadable)


def _open(parameters: Mapping[str, Any], application_name: str, unreadable: ConfigurationError) -> Connection:
    # A URI may name an application too; ours says which processor and pod it is.
    named = {**_LIVENESS, **parameters, "application_name": application_name[:63], "client_encoding": "utf8"}
    try:
        return _with_readable_dates(psycopg.connect(**named, autocommit=True, prepare_threshold=None))
    except psycopg.ProgrammingError:
        # libpq quotes the string it could not read, which may hold the password
        raise unreadable from None
    except psycopg.Error as err:
        raise translate(err) from err
    except OSError as err:  # the driver lets its own selector's out
        raise TransientError(
            f"this process cannot open a connection ({err.strerror}): of open files close those that a handler leaves "
            "open, or raise their limit (ulimit -n)",
            reason=Reason.DATABASE_UNAVAILABLE,
        ) from err


def _with_readable_dates(connection: Connection) -> Connection:
    """Let the session write dates as the driver reads them, where a setting of its role or database says otherwise.

    PgBouncer keeps this setting for each of its clients.
    """
    if not (connection.info.parameter_status("DateStyle") or "ISO").startswith("ISO"):
        connection.execute("SET DateStyle = ISO")  # how a date's order is understood stays
    return connection


def _invalid(what: str) -> ConfigurationError:
    return ConfigurationError(what, reason=Reason.CONNECTION_SECRET_INVALID)


@contextmanager
def limited(connection: Connection, seconds: float) -> Iterator[None]:
    """Open a transaction whose statements each end after so long: for what is worth no more time than that.

    Not inside another one.

    Where this process is frozen in between, the server ends the session after IDLE_SECONDS: an open transaction that
    wrote something keeps every message stored after it from all processors.
    """
    limits = [sql.Literal(str(max(1, int(each * 1000)))) for each in (seconds, IDLE_SECONDS)]
    begin = sql.SQL(
        "BEGIN; "
        "SELECT set_config('statement_timeout', {}, true), set_config('idle_in_transaction_session_timeout', {}, true)"
    )
    try:
        connection.execute(begin.format(*limits))
        yield
    except BaseException:
        with suppress(psycopg.Error):  # the session is lost, and the transaction with it
            connection.rollback()
        raise
    connection.commit()


def send_if_idle_in_transaction(connection: Connection) -> None:
    """Send a statement where the server waits for one inside a transaction: its idle timeout begins anew.

    Only for a caller that holds `connection.lock`.
    """
    session = connection.pgconn
    if session.transaction_status == pq.TransactionStatus.INTRANS and session.pipeline_status == pq.PipelineStatus.OFF:
        session.exec_(b"SELECT 1")
