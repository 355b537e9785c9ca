"""Parquet files that appear with their checkpoint: hidden while written, listed in its transaction, renamed after it.

`<path>/_outbox/<processor>/<epoch>-<attempt>/part-….parquet` is what tasks write for one effect of one batch;
directories whose name begins with `_` are passed over by readers of `<path>`. The files of the tasks that Spark
counts as done are those that its own commit protocol leaves there, or, where tasks write messages as they read them,
those that they return. Each is listed in `spark_files` in the transaction that stores the checkpoint, and moved into
`<path>` after it, under a name that no other file ever had: nothing is overwritten, and a reader meets each row at most
once. After a crash the list says what is still to be moved; it is rolled forward before anything else is done.

Messages that are written as they are go into files in the tasks that read them. Spark would take each into its JVM, as
a row, and write it from there: three times the processor time that reading takes. Arrow has their columns already. The
files are such as Spark writes: the same types, and Spark's own note of the schema.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow.parquet as pq
from psycopg import sql

from outbox_core.errors import PermanentError, TransientError
from outbox_core.report import Reason
from outbox_spark.columns import MESSAGE_SCHEMA, message_arrow_schema
from outbox_spark.reader import RangeReader
from outbox_worker.postgres.errors import translated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from outbox_core.config import ProcessorConfig
    from outbox_spark.offsets import OffsetRange
    from outbox_spark.options import ReadOptions
    from outbox_worker.postgres.connection import Connection, ConnectionFiles

_HIDDEN: Final = "_outbox"
_NO_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
_APPLICATION_NAME: Final = "outbox-spark-files"
_SPARK_SCHEMA: Final = "org.apache.spark.sql.parquet.row.metadata"
_CODEC: Final = "spark.sql.parquet.compression.codec"
_CODECS: Final = {"uncompressed": "none", "lz4_raw": "lz4"}
"""Of Spark's names those that Arrow has others for."""
_REPEATED: Final = (
    "transaction_id", "message_type", "publication_id", "partition_key", "metadata", "scheduled",
)  # fmt: skip
"""Columns whose values come again; a dictionary of the others would be as large as they are."""


@dataclass(frozen=True, slots=True)
class PendingFile:
    """One file on its way: where it lies hidden, and its name for readers."""

    hidden: Path
    final: Path
    rows: int


def hidden_directory(path: Path, processor_id: str, epoch: int) -> Path:
    """Name a new place for one effect's files, unlike every other."""
    return path / _HIDDEN / safe_name(processor_id) / f"{epoch}-{uuid.uuid4().hex}"


def safe_name(processor_id: str) -> str:
    """Make a processor's id a file name; ids that differ never share one."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", processor_id)[:100]
    unchanged = plain == processor_id and not plain.startswith((".", "_"))
    return plain if unchanged else f"p-{plain}-{hashlib.sha256(processor_id.encode()).hexdigest()[:12]}"


def file_uri(path: Path) -> str:
    """Name a place of the mounted file system to Spark, which takes a URI's path as it stands: `%20` is no blank."""
    return f"file://{path}"


class FileArea:
    """The files of one owner; used by the driver."""

    def __init__(self, files: ConnectionFiles, schema: str, processor_id: str, epoch: int) -> None:
        self._files = files
        self._manifest = sql.Identifier(schema, "spark_files")
        self._processor_id = processor_id
        self._epoch = epoch
        self._swept: set[Path] = set()

    def write(
        self, rows: DataFrame, path: Path, whole: OffsetRange, options: ReadOptions | None = None
    ) -> list[PendingFile]:
        """Have executors write the rows under a hidden name; return the files with rows in them, safely on the disk.

        With `options`, by which messages are read, the rows are the range's messages as they are, and each task writes
        those that it reads.

        Raises:
            TransientError: the driver does not see what the executors wrote.

        """
        if path not in self._swept:
            sweep_hidden(path, self._processor_id, self._epoch)
            self._swept.add(path)
        hidden = hidden_directory(path, self._processor_id, self._epoch)
        if options is None:
            counted = _write_rows(rows, hidden)
        else:
            counted = write_messages(rows.sparkSession, options, whole, hidden)
        if not hidden.is_dir():
            raise TransientError(
                f"the driver does not see {hidden}, which executors wrote: mount the same volume at {path} in "
                "driver and executors (spark.volumes)",
                reason=Reason.TARGET_UNAVAILABLE,
            )
        filled = [(file, count) for file, count in counted.items() if count]
        if not filled:
            shutil.rmtree(hidden, ignore_errors=True)  # nothing of it is revealed, which would remove it
            return []
        for file, _ in filled:
            _flush(file)
        _flush(hidden)
        stem = f"{safe_name(self._processor_id)}-{whole.end.transaction_id}-{whole.end.position}-{hidden.name}"
        return [
            PendingFile(file, path / f"{stem}-{number:05d}.parquet", count)
            for number, (file, count) in enumerate(filled)
        ]

    def list_in(self, connection: Connection, files: list[PendingFile]) -> None:
        """Write the manifest, in the transaction that is open on `connection` and stores the checkpoint."""
        statement = sql.SQL(
            "INSERT INTO {} (processor_id, epoch, hidden_path, final_path, row_count) "
            "SELECT %s, %s, file.* FROM unnest(%s::text[], %s::text[], %s::bigint[]) AS file"
        ).format(self._manifest)
        hidden, final = [str(file.hidden) for file in files], [str(file.final) for file in files]
        rows = [file.rows for file in files]
        connection.execute(statement, (self._processor_id, self._epoch, hidden, final, rows))

    def roll_forward(self) -> int:
        """Move every file whose checkpoint is stored, of this epoch or an earlier one; return how many there were.

        Raises:
            PermanentError: the volume lost one.
            TransientError: database or volume cannot be reached.

        """
        find = sql.SQL("SELECT hidden_path, final_path, row_count FROM {} WHERE processor_id = %s ORDER BY id")
        forget = sql.SQL("DELETE FROM {} WHERE processor_id = %s AND final_path = ANY(%s)")
        with self._files.connect(_APPLICATION_NAME) as connection, translated():
            rows = connection.execute(find.format(self._manifest), (self._processor_id,)).fetchall()
            files = [PendingFile(Path(hidden), Path(final), int(count)) for hidden, final, count in rows]
            if files:
                reveal(files)
                names = [str(file.final) for file in files]
                connection.execute(forget.format(self._manifest), (self._processor_id, names))
        return len(files)


def _write_rows(rows: DataFrame, hidden: Path) -> dict[Path, int]:
    rows.write.mode("errorifexists").option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false").parquet(
        file_uri(hidden)
    )
    return {file: pq.read_metadata(file).num_rows for file in sorted(hidden.glob("part-*.parquet"))}


def reveal(files: list[PendingFile]) -> None:
    """Move committed files to their names for readers; one that is there already stays as it is.

    Raises:
        PermanentError: a committed file is neither hidden nor there: the volume lost it.

    """
    for file in files:
        if not file.final.exists():
            _move(file)
    for directory in {file.final.parent for file in files}:
        _flush(directory)
    for directory in {file.hidden.parent for file in files}:
        shutil.rmtree(directory, ignore_errors=True)


def sweep_hidden(path: Path, processor_id: str, epoch: int) -> int:
    """Delete what earlier queries wrote and never committed, up to this epoch; return how many; roll forward first."""
    own = path / _HIDDEN / safe_name(processor_id)
    stale = [entry for entry in own.glob("*-*") if entry.is_dir() and _epoch_of(entry) <= epoch]
    for entry in stale:
        shutil.rmtree(entry, ignore_errors=True)
    return len(stale)


def _epoch_of(directory: Path) -> int:
    number = directory.name.partition("-")[0]
    return int(number) if number.isdecimal() else -1


def _move(file: PendingFile) -> None:
    try:
        _give_name(file)
    except FileNotFoundError as error:
        if not file.final.exists():
            raise PermanentError(
                f"{file.hidden} is gone although the checkpoint counts its {file.rows} rows as written: restore the "
                "volume, or rewind the checkpoint and delete its row of spark_files",
                reason=Reason.TARGET_UNAVAILABLE,
            ) from error
    except OSError as error:
        raise TransientError(
            f"cannot write to {file.final.parent}: {error}", reason=Reason.TARGET_UNAVAILABLE
        ) from error


def _give_name(file: PendingFile) -> None:
    """Link and unlink: unlike rename, a link never replaces a file that is there."""
    try:
        os.link(file.hidden, file.final)
    except FileExistsError:
        return
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        file.hidden.rename(file.final)  # a volume without hard links; the name is ours alone
    else:
        file.hidden.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Wait until a file's contents, or a directory's entries, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def writes_as_read(config: ProcessorConfig) -> bool:
    """Say whether all that a processor does is to write messages into files."""
    target = config.target
    return target is not None and target.parquet is not None and config.plan.application is None


def write_messages(session: SparkSession, options: ReadOptions, whole: OffsetRange, hidden: Path) -> dict[Path, int]:
    """Have tasks write a range's messages into a new directory; return the files of those that Spark counts as done.

    Each file with its number of rows, in the order of the messages.
    """
    pieces = RangeReader(options).fetch_pieces(whole)
    codec = str(session.conf.get(_CODEC)).lower()
    write = partial(write_piece, options, str(hidden), _CODECS.get(codec, codec))
    done = session.sparkContext.parallelize(pieces, len(pieces)).map(write).collect()
    return {hidden / name: rows for name, rows in done}


def write_piece(options: ReadOptions, hidden: str, codec: str, piece: OffsetRange) -> tuple[str, int]:
    """Write a piece's messages into a file of a name that no other attempt has; runs on an executor."""
    directory, name, rows = Path(hidden), f"part-{uuid.uuid4().hex}.parquet", 0
    directory.mkdir(parents=True, exist_ok=True)
    with pq.ParquetWriter(
        directory / name, message_arrow_schema(), compression=codec, use_dictionary=list(_REPEATED), store_schema=False,
        use_deprecated_int96_timestamps=True,
    ) as writer:  # fmt: skip
        writer.add_key_value_metadata({_SPARK_SCHEMA: MESSAGE_SCHEMA.json()})
        for page in RangeReader(options).read(piece):
            writer.write_batch(page)
            rows += page.num_rows
    return name, rows
