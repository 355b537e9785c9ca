"""The live table: redrawn in place on a terminal, written every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from outbox_cli.table import format_rows
from outbox_core.plain import plain_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from outbox_cli.try_out.processors import Worker

_HEAD: Final = ("WORKER", "PID", "PHASE", "OWNER", "CHECKPOINT", "HANDLED", "MSG/S", "LAG", "CONFLICTS")
_DROPPED: Final = ("CHECKPOINT", "PID", "MSG/S", "OWNER")
"""Columns that are left out, in this order, until the others fit into the terminal."""
_PLAIN_EVERY: Final = 5.0
"""Seconds between two tables where the output is no terminal."""
_RATE_OVER: Final = 4.0
STALLED_AFTER: Final = 4.0
"""Seconds; the shop's own transactions are shorter. As in `outbox_core.report`, which would have to be imported."""
CALM: Final = ("Active", "Standby", "Starting", "Draining")


@dataclass(slots=True)
class Rates:
    """Messages per second of each worker, over the last few seconds."""

    _samples: dict[str, deque[tuple[float, int]]] = field(default_factory=dict)

    def note(self, name: str, at: float, handled: int) -> float:
        """Take a sample; return the rate."""
        samples = self._samples.setdefault(name, deque())
        samples.append((at, handled))
        while len(samples) > 2 and at - samples[0][0] > _RATE_OVER:
            samples.popleft()
        (since, before), elapsed = samples[0], at - samples[0][0]
        return max(0.0, (handled - before) / elapsed) if elapsed > 0 and since < at else 0.0


def build_row(worker: Worker, rate: float) -> tuple[str, ...]:
    """Say how one worker is."""
    report = worker.report
    if not report:
        phase = "Starting" if worker.pid else "Ended"
        return worker.name, str(worker.pid or "-"), phase, "-", "-", str(worker.handled), "-", "-", "-"
    state, reason = report["state"], report["reason"]
    phase = state if reason in {"Running", "Idle", "Starting", "LeaseHeld"} else f"{state}: {reason}"
    active = state in {"Active", "Retrying"}
    return (
        worker.name, str(worker.pid), phase, _owner(worker.processor.mode, report), _checkpoint(report),
        str(worker.handled), f"{rate:.0f}" if active else "-", _lag(report),
        str((report.get("conflicts") or {}).get("count", 0)),
    )  # fmt: skip


def _owner(mode: str, report: dict[str, Any]) -> str:
    if mode == "Competing":
        return "consumer"
    held = [lease for lease in report.get("leases") or [] if lease.get("held")]
    if held:
        return "partitions " + ",".join(str(lease["partition"]) for lease in held)
    lease = report.get("lease") or {}
    if lease.get("held"):
        return f"yes, epoch {lease.get('epoch')}"
    return f"no: {lease['pod']}" if lease.get("pod") else "no"


def _checkpoint(report: dict[str, Any]) -> str:
    pairs = [plain_checkpoints(checkpoint["pair"]) for checkpoint in report.get("checkpoints") or []]
    if not pairs:
        return "-"
    return pairs[0] if len(pairs) == 1 else f"{pairs[0]} +{len(pairs) - 1}"


def _lag(report: dict[str, Any]) -> str:
    lag = report.get("lag")
    if not lag:
        return "-"
    return f"{lag['messages']}{'+' if lag.get('atLeast') else ''} ({lag['seconds']:.1f} s)"


def build_table(rows: Iterable[Sequence[str]], width: int | None = None) -> list[str]:
    """Lay the rows out under the head, in lines of that width where there is one."""
    shown, lines = list(_HEAD), [_HEAD, *rows]
    table = format_rows(lines)
    for name in _DROPPED:
        if width is not None and max(map(len, table)) > width:
            shown.remove(name)
            table = format_rows([[row[_HEAD.index(column)] for column in shown] for row in lines])
    return table


def build_notes(workers: Sequence[Worker], outbox: str) -> dict[tuple[str, object], str]:
    """Say what stands still, why, and the commands that end it: each note by what it is about, as numbers change."""
    notes: dict[tuple[str, object], str] = {}
    for worker in workers:
        name, report = worker.processor.processor_id, worker.report
        open_ = (report.get("conflicts") or {}).get("open")
        mark = report.get("highWaterMark") or {}
        if open_:
            notes.setdefault((name, open_["id"]), _describe_conflict(name, open_, outbox))
        elif report and report["state"] not in CALM:
            notes.setdefault((name, report["reason"]), f"{name}: {report.get('message', '')}")
        elif mark.get("holder") and mark["ageSeconds"] >= STALLED_AFTER and worker.processor.waits:
            remedy = mark.get("remedy")
            notes.setdefault((name, remedy), f"{name} must wait for {mark['holder']}; to end it: {remedy}")
    return notes


def _describe_conflict(name: str, conflict: dict[str, Any], outbox: str) -> str:
    number, code = conflict["id"], conflict["code"]
    what = {2: "ahead of", 3: "behind"}.get(code, "not")
    return (
        f"{name}: code {code}: the stored checkpoint is {conflict.get('stored') or 'gone'}, {what} what its owner had "
        f"stored, {conflict.get('expected')}. Nothing runs until you decide:\n"
        f"    {outbox} conflicts accept {number}\n"
        f"    {outbox} rewind {name} --to {conflict.get('expected')} --conflict {number} --reason 'a trial'"
    )


class Screen:
    """Writes to standard output."""

    def __init__(self) -> None:
        """Nothing is drawn yet; where there is no terminal the first table has time."""
        self._terminal = sys.stdout.isatty()
        self._drawn = 0
        self._last = time.monotonic()

    @property
    def width(self) -> int | None:
        """How long a line of the table may be; None: as long as it is."""
        return shutil.get_terminal_size().columns - 1 if self._terminal else None

    def say(self, *lines: str) -> None:
        """Write lines that stay, above the table."""
        self._clear()
        for line in lines:
            sys.stdout.write(f"{plain_checkpoints(line)}\n")
        sys.stdout.flush()

    def draw(self, lines: Sequence[str], at: float, *, now: bool = False) -> None:
        """Draw the table in place of the last one; where there is no terminal, seldom."""
        if not self._terminal:
            if now or at - self._last >= _PLAIN_EVERY:
                self._last = at
                sys.stdout.write(plain_checkpoints("\n".join(lines)) + "\n\n")
                sys.stdout.flush()
            return
        self._clear()
        shown = [line[: self.width] for line in lines]
        sys.stdout.write("\n".join(shown) + "\n")
        sys.stdout.flush()
        self._drawn = len(shown)

    def leave(self) -> None:
        """Keep the table that stands there."""
        self._drawn = 0

    def _clear(self) -> None:
        if self._terminal and self._drawn:
            sys.stdout.write(f"\x1b[{self._drawn}F\x1b[J")
        self._drawn = 0
