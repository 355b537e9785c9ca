"""Structured logs: one JSON object a line on standard error. Never a payload, never a secret.

`OUTBOX_LOG_FORMAT=text` writes the same for a person at a terminal (`outbox run` does).
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from math import isfinite
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from outbox_core.plain import plain_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ABOUT: Final = ContextVar[dict[str, object]]("about")
"""Fields of every line that is written now: which processor, or which partition, it is about."""
_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextmanager
def about(names: Mapping[str, object]) -> Iterator[None]:
    """Give these fields to every line of this thread that is written in the block."""
    before = ABOUT.set({**names})
    try:
        yield
    finally:
        ABOUT.reset(before)


class JsonFormatter(logging.Formatter):
    """A record with its `extra` fields as JSON."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields(record)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The same on one line for a person: time, level, message, fields."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        told = " ".join(f"{name}={value}" for name, value in _fields(record).items() if value is not None)
        told = plain_checkpoints(told)
        line = f"{time} {record.levelname.lower():<7} {record.getMessage()} {told}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields of `extra`; a number without end (a retry that never comes) is none: JSON has no infinity."""
    fields = ABOUT.get({}) | {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in fields.items()}


LOG_FORMAT: Final = "OUTBOX_LOG_FORMAT"
"""Variable of the environment: `json` or `text`."""


def set_up_logging(level: str = "INFO") -> None:
    """Send every logger's records to standard error as JSON, or as the environment says."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter() if os.environ.get(LOG_FORMAT) == "text" else JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


def get_logger(name: str) -> logging.Logger:
    """Return a logger of this process."""
    return logging.getLogger(name)
