"""The options of `format("outbox")`, from Spark's strings to values. PURE.

| option | meaning | default |
|---|---|---|
| `connection` | directory of files as a mounted Secret has them (`uri`, or `host`, `port`, `database`, `user`, \
`password`), at the same path on driver and executors | required |
| `schema` | schema of the outbox | `outbox` |
| `table` | `schema.table` of an outbox that exists already | `messages` in `schema` |
| `publications`, `messageTypes` | read only these; comma-separated | all |
| `batchSize` | most rows that one micro-batch examines | 10000 |
| `batchBytes` | about how many bytes of data one micro-batch has at most, and at least one row | no limit |
| `partitions` | into how many pieces a range is read in parallel | 2 |
| `fetchSize` | most rows fetched at once by an executor; about 8 MB of them at most | 50000 |
| `start` | `beginning`, `end`, a checkpoint `transaction_id:position` (what lies after it), or an RFC 3339 time \
| `beginning` |
| `end` | only `spark.read`: a checkpoint, read up to and including it | what is settled now |

Secrets are no options: Spark shows options in plans, logs and its web page.

Three more are for the processor's driver: `source`, the whole source as JSON (column mapping included), in place of
schema, table, publications and messageTypes; `floor`, a checkpoint up to which everything is handled: a range that
Spark plans again is read only after it; `interval`, the seconds between two looks for messages while a look finds
less than a full micro-batch.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from outbox_core.errors import ConfigurationError
from outbox_core.plain import plain_faults
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, parse_checkpoint
from outbox_core.spec import Connection, ObjectRef, Source, StartFrom, StartType, Table

if TYPE_CHECKING:
    from collections.abc import Mapping

_KNOWN: Final = frozenset(
    {
        "connection", "schema", "table", "publications", "messagetypes", "batchsize", "batchbytes", "partitions",
        "fetchsize", "start", "end", "source", "floor", "interval",
    }
)  # fmt: skip
_SECRET: Final = frozenset({"password", "uri", "url", "dsn", "user", "conninfo"})
_BATCH_SIZE: Final = 10_000
_PARTITIONS: Final = 2
_FETCH_SIZE: Final = 50_000


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Everything a reader needs; small, without secrets, and sent to the executors."""

    connection: Path
    source: Source
    batch_size: int
    batch_bytes: int | None
    partitions: int
    fetch_size: int
    start: Checkpoint | StartFrom
    end: Checkpoint | None
    floor: Checkpoint
    interval: float


def parse_options(options: Mapping[str, str]) -> ReadOptions:
    """Read Spark's options; their names are compared without regard to case, as Spark does.

    Raises:
        ConfigurationError: an option is unknown, missing, or its value cannot be used; the message says what to write.

    """
    given = {key.lower(): value for key, value in options.items()}
    _refuse_unknown(given)
    if not given.get("connection"):
        raise ConfigurationError(
            "option connection is missing: name a directory with the file `uri`, or host, port, database, user, "
            "password"
        )
    return ReadOptions(
        connection=Path(given["connection"]),
        source=_source(given),
        batch_size=_whole(given, "batchsize", _BATCH_SIZE),
        batch_bytes=_whole(given, "batchbytes", 1) if "batchbytes" in given else None,
        partitions=_whole(given, "partitions", _PARTITIONS),
        fetch_size=_whole(given, "fetchsize", _FETCH_SIZE),
        start=_start(given.get("start", "beginning")),
        end=_pair(given, "end"),
        floor=_pair(given, "floor") or BEGINNING,
        interval=float(given.get("interval", "0")),
    )


def _refuse_unknown(given: Mapping[str, str]) -> None:
    if secrets := sorted(_SECRET & given.keys()):
        raise ConfigurationError(
            f"option {secrets[0]} is not taken: Spark shows options in plans and logs. Put it into a file of the "
            "directory that option connection names"
        )
    # Spark adds a path when load() gets one; it would not be read.
    if unknown := sorted(given.keys() - _KNOWN):
        raise ConfigurationError(f"option {unknown[0]} is unknown; known are {', '.join(sorted(_KNOWN))}")


def _source(given: Mapping[str, str]) -> Source:
    try:
        if "source" in given:
            return Source.model_validate_json(given["source"])
        table = given.get("table")
        schema_name, _, name = table.rpartition(".") if table else ("", "", "")
        return Source(
            connection=Connection(secret_ref=ObjectRef(name="files")),  # the files are named by path here
            schema_name=given.get("schema", "outbox"),
            table=Table(schema_name=schema_name or "public", name=name) if table else None,
            publications=_names(given.get("publications", "")),
            message_types=_names(given.get("messagetypes", "")),
        )
    except ValidationError as error:
        raise ConfigurationError(f"the options do not name a source: {plain_faults(error.errors())}") from error


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def _whole(given: Mapping[str, str], key: str, default: int) -> int:
    text = given.get(key, str(default)).strip()
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"option {key} must be a whole number above 0, not {text!r}")
    return int(text)


def _pair(given: Mapping[str, str], key: str) -> Checkpoint | None:
    if key not in given:
        return None
    try:
        return parse_checkpoint(given[key])
    except ValueError as error:
        raise ConfigurationError(f"option {key}: {error}") from error


def _start(text: str) -> Checkpoint | StartFrom:
    word = text.strip().lower()
    if word in ("beginning", "end"):
        return StartFrom(type=StartType(word.capitalize()))
    with suppress(ValueError):
        return parse_checkpoint(text)
    moment = None
    with suppress(ValueError):
        moment = datetime.fromisoformat(text)
    if moment is None or moment.tzinfo is None:  # without a zone it would be a time of the role's TimeZone
        raise ConfigurationError(
            f"option start: {text!r} is none of: beginning, end, transaction_id:position, an RFC 3339 time such as "
            "2026-01-02T03:04:05Z"
        )
    return StartFrom(type=StartType.TIMESTAMP, timestamp=moment)
