"""What went wrong in Spark, in the domain's words. PURE.

Spark reports an error of a task or of the planner as text, with the Python traceback inside; our own errors are
found in it again by their class names. A failure in the user's code counts as an attempt; lost executors and an
unreachable database do not.
"""

from __future__ import annotations

import re
import traceback
from typing import Final

from outbox_core.errors import ConfigurationError, HandlerError, OutboxError, PermanentError, TransientError
from outbox_core.report import Reason

_OURS: Final = re.compile(r"outbox_core\.errors\.(\w+Error): ([^\n]*)")
_CLASSES: Final[dict[str, tuple[type[OutboxError], Reason]]] = {
    "TransientError": (TransientError, Reason.DATABASE_UNAVAILABLE),
    "ConfigurationError": (ConfigurationError, Reason.INVALID_CONFIGURATION),
    "PermanentError": (PermanentError, Reason.INTERNAL_ERROR),
    "HandlerError": (HandlerError, Reason.HANDLER_FAILED),
}
_STATE: Final = re.compile(
    r"STATE_STORE\w*|STATE_SCHEMA\w*|STREAMING_STATEFUL_OPERATOR\w*|StateSchemaNotCompatible|INCOMPATIBLE_STATE"
)
_INFRASTRUCTURE: Final = re.compile(
    r"ExecutorLostFailure|FetchFailed|Lost executor|No space left on device|Python worker exited unexpectedly"
    r"|Python worker failed to connect back|Master removed our application"
)
_PYTHON: Final = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception|Warning|Interrupt)\b[^\n]*", re.MULTILINE)
_DETAIL: Final = 4_000
_SENTENCE: Final = 400


def explain_failure(error: BaseException, code: str) -> OutboxError:
    """Say what a failed batch or query means; `code` names what ran, for example `orders.handle`."""
    if isinstance(error, OutboxError):
        return error
    text = str(error)
    if ours := _OURS.search(text):
        kind, reason = _CLASSES.get(ours[1], (TransientError, Reason.INTERNAL_ERROR))
        return kind(ours[2][:_SENTENCE], reason=reason)
    if _STATE.search(text):
        return PermanentError(
            f"the state of the query's operators does not go with {code}: {_first_line(text)}. Restore the application "
            "that wrote it, or rewind the checkpoint to where new state shall be built from",
            reason=Reason.QUERY_STATE_MISMATCH,
            detail=text[-_DETAIL:],
        )
    if _INFRASTRUCTURE.search(text):
        return TransientError(
            f"executors were lost: {_first_line(text)}", reason=Reason.TARGET_UNAVAILABLE, detail=text[-_DETAIL:]
        )
    detail = "".join(traceback.format_exception(error)) if _is_plain(error) else text
    return HandlerError(f"{code} failed: {_cause(error, text)}", reason=Reason.HANDLER_FAILED, detail=detail[-_DETAIL:])


def _is_plain(error: BaseException) -> bool:
    """Is it an error of Python code on the driver, not one that Spark reports from elsewhere?"""
    return type(error).__module__.partition(".")[0] not in ("pyspark", "py4j")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:_SENTENCE]


def _cause(error: BaseException, text: str) -> str:
    """Return the innermost Python error that Spark quotes, or else its own first line."""
    quoted = _PYTHON.findall(text) if "Traceback (most recent call last)" in text else []
    said = quoted[-1] if quoted else _first_line(text)
    return f"{type(error).__name__}: {said}"[:_SENTENCE] if _is_plain(error) else said[:_SENTENCE]
