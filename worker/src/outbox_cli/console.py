"""How commands speak: results on stdout as a table or as one JSON document, everything else on stderr."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from pydantic.alias_generators import to_camel

from outbox_cli.errors import RefusedError
from outbox_cli.progress import Progress
from outbox_core.plain import plain_checkpoints
from outbox_core.span import format_age

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

Record = dict[str, Any]
"""One result; keys are camelCase, as in the resource's status."""


_ESCAPED: Final = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160))}
"""Control characters: a key or an error that a producer wrote must not move the cursor of a terminal."""
_ESCAPED_IN_TEXT: Final = {code: text for code, text in _ESCAPED.items() if chr(code) not in "\n\t"}


class Format(StrEnum):
    """How results are written."""

    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its title, and the key of the record that it shows."""

    title: str
    key: str


class Console:
    """One command's way to speak."""

    def __init__(self, style: Format, *, assume_yes: bool) -> None:
        """Keep how to speak, and whether questions are answered already."""
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

    def show(self, records: Sequence[Record], columns: Sequence[Column], *, empty: str) -> None:
        """Write a list; an empty one says so to people."""
        if self.is_json:
            self.document(list(records))
        elif not records:
            self.note(empty)
        else:
            for line in format_table(records, columns):
                self.say(line)

    def show_one(self, record: Record) -> None:
        """Write one result, a field a line."""
        if self.is_json:
            self.document(record)
            return
        width = max((len(name) for name in record), default=0)
        for name, value in record.items():
            self.say(f"{name + ':':<{width + 1}} {format_cell(value)}")

    def document(self, value: object) -> None:
        """Write the JSON document; nothing in table form."""
        if self.is_json:
            print(json.dumps(value, default=_plain, indent=2), flush=True)  # noqa: T201

    def progress(self, what: str, total: int | None = None) -> Progress:
        """Show how far something long is."""
        return Progress(what, total, sys.stderr)

    def confirm(self, question: str) -> None:
        """Ask, unless --yes said it.

        Raises:
            RefusedError: the answer is no, or there is no terminal to ask at.

        """
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


def format_table(records: Sequence[Record], columns: Sequence[Column]) -> Iterable[str]:
    """Lay records out under titles, as wide as they need."""
    rows = [[column.title for column in columns]]
    rows += [[format_cell(record.get(column.key)) for column in columns] for record in records]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    for row in rows:
        yield "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


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
