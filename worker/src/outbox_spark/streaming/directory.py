"""Spark's query checkpoint directory on the volume: what it says, and which one is current.

    <queryCheckpointPath>/<processor>/<generation>/lineage.json    under what it was begun
    <queryCheckpointPath>/<processor>/<generation>/query/          Spark's own: offsets/N, commits/N, state/

A generation is never edited by us: a new one is begun beside it (resume.py says when), and older ones are removed
once the new one stands. `offsets/N` is what Spark planned for batch N, written before the batch runs; `commits/N`
that it is over.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from outbox_core.errors import PermanentError, TransientError
from outbox_core.progress.checkpoint import Checkpoint, parse_checkpoint
from outbox_core.report import Reason
from outbox_spark.offsets import OffsetRange, parse_offset, parse_range
from outbox_spark.streaming.resume import DirectoryView, Lineage
from outbox_spark.writing.files import safe_name

if TYPE_CHECKING:
    from pathlib import Path

_OFFSET_LOG: Final = "v1"
_LINEAGE: Final = "lineage.json"


@dataclass(frozen=True, slots=True)
class QueryDirectory:
    """One generation."""

    path: Path
    lineage: Lineage
    start: Checkpoint

    @property
    def location(self) -> Path:
        """What Spark is given as checkpointLocation."""
        return self.path / "query"

    def view(self) -> DirectoryView:
        """Read what Spark planned and finished.

        Raises:
            PermanentError: the directory cannot be read as Spark 4 writes it.

        """
        committed = _numbers(self.location / "commits")
        return DirectoryView(
            lineage=self.lineage,
            committed=self._end_of(committed[-1]) if committed else self.start,
            planned=self.find_planned(),
            has_state=any((self.location / "state").glob("*")),
        )

    def find_planned(self) -> Checkpoint:
        """Return the end of the last batch that Spark planned."""
        planned = _numbers(self.location / "offsets")
        return self._end_of(planned[-1]) if planned else self.start

    def range_of(self, batch_id: int) -> OffsetRange:
        """Return the range that Spark planned for a batch."""
        start = self.start if batch_id == 0 else self._end_of(batch_id - 1)
        return parse_range(start, self._offset_of(batch_id))

    def has_committed(self, batch_id: int) -> bool:
        """Did Spark note that the batch is over?"""
        return (self.location / "commits" / str(batch_id)).exists()

    def _end_of(self, batch_id: int) -> Checkpoint:
        return parse_offset(self._offset_of(batch_id))

    def _offset_of(self, batch_id: int) -> dict[str, Any]:
        file = self.location / "offsets" / str(batch_id)
        try:
            return parse_offset_log(file.read_text())
        except (OSError, ValueError) as error:
            raise PermanentError(
                f"{file} cannot be read as the offset log of this processor's query: {error}. Restore the volume, or "
                f"remove {self.path}: the stored checkpoint is the authority",
                reason=Reason.QUERY_STATE_MISMATCH,
            ) from error


def parse_offset_log(text: str) -> dict[str, Any]:
    """Read the offset at the end of a batch from an `offsets/N` file.

    Raises:
        ValueError: another format, or not one source, or not ours.

    """
    version, *lines = text.splitlines()
    if version != _OFFSET_LOG or len(lines) != 2:
        msg = f"expected format {_OFFSET_LOG} with one source, found {version} with {len(lines) - 1}"
        raise ValueError(msg)
    offset: dict[str, Any] = json.loads(lines[1])
    parse_offset(offset)
    return offset


class QueryDirectories:
    """All generations of one processor."""

    def __init__(self, root: Path, processor_id: str) -> None:
        self._root = root / safe_name(processor_id)

    def current(self) -> QueryDirectory | None:
        """Return the newest generation that was begun to the end; None when there is none."""
        for number in reversed(_numbers(self._root)):
            path = self._root / str(number)
            try:
                said = json.loads((path / _LINEAGE).read_text())
                return QueryDirectory(path, Lineage(**said["lineage"]), parse_checkpoint(said["start"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue  # begun and not finished, or damaged: as good as lost
        return None

    def begin(self, lineage: Lineage, start: Checkpoint) -> QueryDirectory:
        """Begin a new generation and remove older ones.

        Raises:
            TransientError: the volume does not take it.

        """
        older = _numbers(self._root)
        path = self._root / str(older[-1] + 1 if older else 0)
        try:
            path.mkdir(parents=True)
            temporary = path / f".{_LINEAGE}"
            with temporary.open("w") as out:
                json.dump({"lineage": asdict(lineage), "start": str(start)}, out)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(path / _LINEAGE)
        except OSError as error:
            raise TransientError(
                f"cannot write the query checkpoint directory {path}: {error}. Mount a volume that outlives the driver "
                "at spark.queryCheckpointPath",
                reason=Reason.TARGET_UNAVAILABLE,
            ) from error
        for number in older:
            shutil.rmtree(self._root / str(number), ignore_errors=True)
        return QueryDirectory(path, lineage, start)


def _numbers(directory: Path) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in directory.iterdir() if entry.name.isdecimal())
    except FileNotFoundError:
        return []
