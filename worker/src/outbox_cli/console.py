"""How commands speak: results on stdout as a table or as one JSON document, everything else on stderr.

Progress of long work is a bar on a terminal, else a line now and then, so that a log tells it too.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, TextIO

from pydantic.alias_generators import to_camel

from outbox_cli.errors import Exit, RefusedError
from outbox_cli.table import format_rows
from outbox_core.plain import plain_checkpoints
from outbox_core.span import format_age

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Self

Record = dict[str, Any]
"""One result; keys are camelCase, as in the resource's status."""
_ESCAPED: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}
"""Control characters: a key or an error that a producer wrote must not move the cursor of a terminal."""
_ESCAPED_IN_TEXT: Final = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}


class Format(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"


class Console:
    """One command's way to speak."""

    def __init__(self, style: Format, *, assume_yes: bool) -> None:
        self._style = style
        self._assume_yes = assume_yes

    @property
    def is_json(self) -> bool:
        """Results are one JSON document."""
        return self._style is Format.JSON

    def say(self, line: str) -> None:
        """Tell a person what is done; in JSON the document says it."""
        if not self.is_json:
            print(printable(line), flush=True)  # noqa: T201  # a command line speaks

    def note(self, line: str) -> None:
        """Tell a person something beside the result."""
        print(printable(line), file=sys.stderr, flush=True)  # noqa: T201

    def show(self, records: Sequence[Record], columns: Mapping[str, str], *, empty: str) -> Exit:
        """Write a list, to people as a table: `columns` names each title's field. An empty one says so to them."""
        if not records and not self.is_json:
            self.note(empty)
            return Exit.DONE
        rows = [[format_cell(record.get(name)) for name in columns.values()] for record in records]
        return self.tell(list(records), *format_rows([list(columns), *rows]))

    def tell(self, document: object, *lines: str) -> Exit:
        """Write a result: to a program the document, to a person the lines."""
        if self.is_json:
            print(json.dumps(document, default=_plain, indent=2), flush=True)  # noqa: T201
        for line in lines:
            self.say(line)
        return Exit.DONE

    def progress(self, what: str, total: int | None = None) -> Progress:
        """Show how far something long is."""
        return Progress(what, total, sys.stderr)

    def confirm(self, question: str) -> None:
        """Ask, unless --yes said it, and refuse unless the answer is yes."""
        if self._assume_yes:
            return
        if not sys.stdin.isatty():
            raise RefusedError("standard input is no terminal: look with --dry-run, then say it with --yes")
        print(f"{printable(question)} [y/N] ", end="", file=sys.stderr, flush=True)  # noqa: T201
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise RefusedError("not done")


def record_of(found: Any, but: Collection[str] = ()) -> Record:
    """Return the fields of a dataclass, without those that are named."""
    return {to_camel(each.name): getattr(found, each.name) for each in fields(found) if each.name not in but}


def printable(text: str) -> str:
    """Write a text of one or more lines for people."""
    return plain_checkpoints(text).translate(_ESCAPED_IN_TEXT)


def format_fields(record: Record) -> list[str]:
    """Write one result, a field a line."""
    return format_rows([[f"{name}:", format_cell(value)] for name, value in record.items()])


def format_cell(value: object) -> str:
    """Write one value for people."""
    if value is None or value in ("", []):
        return "-"
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return format_age(value)
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        case list():
            return ", ".join(str(part) for part in value).translate(_ESCAPED)
        case _:
            return plain_checkpoints(str(value)).translate(_ESCAPED)


def format_counts(by_type: Mapping[str, int]) -> str:
    """Write counts by type, the largest first."""
    return ", ".join(f"{count} {name or 'without type'}" for name, count in by_type.items())


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else str(value)


EVERY_SECONDS: Final = 5.0
"""Between two lines where there is no terminal; work that is done sooner prints none."""
_REDRAW_SECONDS: Final = 0.1
_WIDTH: Final = 30


class Progress:
    """How far one piece of work is; with a total, in parts of it."""

    def __init__(
        self, what: str, total: int | None, stream: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Show nothing before the first `reach`."""
        self._what = what
        self._total = total
        self._stream = stream
        self._clock = clock
        self._bar = stream.isatty()
        self._due = clock() + (0.0 if self._bar else EVERY_SECONDS)
        self._drawn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the terminal's line empty for what comes next."""
        if self._drawn:
            self._stream.write("\r" + " " * self._drawn + "\r")
            self._stream.flush()

    def reach(self, done: int, of: int | None = None) -> None:
        """Tell how much is done; `of` is a total that is known only now, perhaps estimated."""
        now = self._clock()
        if now < self._due:
            return
        self._due = now + (_REDRAW_SECONDS if self._bar else EVERY_SECONDS)
        total = self._total if of is None or of <= 0 else max(of, done)
        line = format_progress(self._what, done, total, bar=self._bar)
        if self._bar:
            self._stream.write("\r" + line.ljust(self._drawn))
            self._drawn = max(self._drawn, len(line))
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def format_progress(what: str, done: int, total: int | None, *, bar: bool) -> str:
    """Write the line."""
    if total is None:
        return f"{what}: {done:,} …"
    if not bar:
        return f"{what}: {done:,} of {total:,}"
    filled = _WIDTH if total <= 0 else min(_WIDTH, done * _WIDTH // total)
    return f"{what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {done:,}/{total:,}"
