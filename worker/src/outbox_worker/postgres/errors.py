"""From the driver's exceptions to the domain's, in one place: SQLSTATE in, `Reason` and a sentence for people out.

Only the server's primary message is passed on: DETAIL and CONTEXT may quote rows, and a row is a payload.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import psycopg

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, PermanentError, TransientError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from collections.abc import Iterator

DatabaseError = psycopg.Error
"""What the driver raises: all that is known of it outside of this package."""

_MISSING: Final = frozenset({"3F000", "42P01", "42883", "42703"})
"""Schema, table, function, column."""
_PUT_RIGHT: Final = (
    "if it is the product's own, run `outbox migrate` as its owner; if source.table maps it, correct that"
)
_UNREADABLE: Final = (
    "if source.table maps the table, its key is read from JSON, and a row holds text that jsonb does not take: correct "
    "or delete that row; docs/partitioned.md says how to find it"
)
_READ_ONLY: Final = (
    "the server is a standby, or default_transaction_read_only is on for the server, the database or the role; it is "
    "tried again until writes are allowed"
)
_CANCELLED: Final = (
    "if statement_timeout of the server, the database or the role did it, raise it for the role of this connection; it "
    "is tried again"
)
_NO_JSONB: Final = frozenset({"22P02", "22P05", "22003"})
"""What jsonb says to text that is no JSON, to \\u0000 and halves of characters, to numbers that are too long."""
_TRY_AGAIN: Final = frozenset({"40001", "40P01", "55P03", "55006", "57014", "25P02"})
"""Serialization, deadlock, lock timeout, object in use, cancelled, transaction already failed."""
_UNAVAILABLE: Final = ("08", "53", "57P", "58", "XX")
"""Connection, resources, shutdown or crash, operating system, internal: the server is not well."""
_REFUSED: Final = re.compile(
    r"authentication failed|no password supplied|role \".*\" (does not exist|is not permitted to log in)"
    r"|no pg_hba\.conf entry|permission denied for database|SASL|no such user",
    re.IGNORECASE,
)


def translate(error: psycopg.Error) -> OutboxError:
    """Say what a driver error means to an outbox processor.

    A connection that was lost or never came about is transient; so is everything with which another try may succeed. A
    statement that the server understood and rejected is permanent.
    """
    said = error.diag.message_primary or str(error).strip().split("\n")[0]
    match error.sqlstate:
        case None:
            return _without_state(error, said)
        case "42501":
            return ConfigurationError(f"{said}: grant it, see sql/README.md", reason=Reason.PERMISSION_DENIED)
        case "OB001":
            return ConfigurationError(said, reason=Reason.SUPERSEDED)
        case state if state in _MISSING:
            return ConfigurationError(f"{said}: {_PUT_RIGHT}", reason=Reason.SCHEMA_MISSING)
        case state:
            return _by_class(state, said)


def as_refused_commit(error: OutboxError) -> OutboxError:
    """Return the error of a constraint that waits for the commit: the effects are refused, as by their statement."""
    if isinstance(error, TransientError):
        return error
    return HandlerError(f"the database refused to commit: {error}", reason=Reason.STATEMENT_FAILED)


def build_error(state: str, message: str) -> psycopg.Error:
    """Return what the driver would have raised for an error that a function of ours caught and named."""
    try:
        return psycopg.errors.lookup(state)(message)
    except KeyError:
        error = psycopg.DatabaseError(message)
        error.sqlstate = state
        return error


def _by_class(state: str, said: str) -> OutboxError:
    if state.startswith("28"):
        return TransientError(said, reason=Reason.AUTHENTICATION_FAILED)
    if state == "25P03":
        return TransientError("idle in its transaction for too long: the server ended it", reason=Reason.LEASE_LOST)
    if state == "25006":
        return TransientError(f"{said}: {_READ_ONLY}", reason=Reason.DATABASE_UNAVAILABLE)
    if state in _TRY_AGAIN:
        remedy = f": {_CANCELLED}" if state == "57014" else ""
        return TransientError(f"{said} ({state}){remedy}", reason=Reason.STATEMENT_FAILED)
    if state.startswith(_UNAVAILABLE):
        return TransientError(said, reason=Reason.DATABASE_UNAVAILABLE)
    remedy = f": {_UNREADABLE}" if state in _NO_JSONB else ""
    return PermanentError(f"{said} ({state}){remedy}", reason=Reason.STATEMENT_FAILED)


def _without_state(error: psycopg.Error, said: str) -> OutboxError:
    if _REFUSED.search(str(error)):
        return TransientError(said, reason=Reason.AUTHENTICATION_FAILED)
    if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return TransientError(said, reason=Reason.DATABASE_UNAVAILABLE)
    if isinstance(error, psycopg.InternalError):
        # The driver's own: a COMMIT or a savepoint was answered with an error and the end of the connection.
        return TransientError(f"the server ended the session ({said})", reason=Reason.DATABASE_UNAVAILABLE)
    return PermanentError(said, reason=Reason.STATEMENT_FAILED)


@contextmanager
def translated() -> Iterator[None]:
    """Let no psycopg error out of the block."""
    try:
        yield
    except psycopg.Error as err:
        raise translate(err) from err
