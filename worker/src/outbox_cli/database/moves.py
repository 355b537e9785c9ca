"""A move of a checkpoint: how a person sees it before it is made, what the database answers, and who is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from outbox_cli.console import Record, format_counts
from outbox_cli.errors import RefusedError
from outbox_core.plain import plain_count
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint
from outbox_worker.postgres.admin.preview import Count, count_between
from outbox_worker.postgres.progress import conflicts

if TYPE_CHECKING:
    from outbox_cli.context import Context
    from outbox_cli.database.sources import Sources
    from outbox_worker.postgres.admin.overview import ProcessorView

LOCAL = "local/"
"""How the cluster of what `outbox run` claims begins, where no --cluster-id is given."""


class Direction(Enum):
    """Which way, and what that means for messages."""

    BACK = "handled again"
    FORWARD = "passed over, never handled"


@dataclass(frozen=True, slots=True)
class Move:
    """A move as the person sees it before it is made."""

    view: ProcessorView
    before: Checkpoint | None
    after: Checkpoint
    direction: Direction
    count: Count
    place: str = ""
    """Cursor Snapshot: where `after` is, in words; the pair only counts."""

    def sentence(self) -> str:
        """Say it to a person."""
        total = plain_count(self.count.total, "message")
        total = f"{self.count.total} or more messages" if self.count.at_least else total
        kinds = f" ({format_counts(self.count.by_type)})" if self.count.by_type else ""
        moved = f"{self.view.processor_id} partition {self.view.partition}: {self.before or 'no checkpoint'}"
        return f"{moved} -> {self.place or self.after}: {total} would be {self.direction.value}{kinds}"

    def record(self, *, done: bool) -> Record:
        """Write it for a program."""
        return {
            "processorId": self.view.processor_id,
            "partition": self.view.partition,
            "from": None if self.before is None else str(self.before),
            "to": str(self.after),
            "direction": self.direction.name.lower(),
            "messages": self.count.total,
            "atLeast": self.count.at_least,
            "byType": self.count.by_type,
            "ownerLive": self.view.live,
            "done": done,
        }


def preview(
    sources: Sources, context: Context, view: ProcessorView, before: Checkpoint | None, after: Checkpoint
) -> Move:
    """Count what lies between the two checkpoints."""
    start = BEGINNING if before is None else before
    direction = Direction.FORWARD if after > start else Direction.BACK
    if after.snapshot_range is not None:
        # Counters count the messages examined.
        between = abs(after.position - start.position)
        return Move(view, before, after, direction, Count({"any type": between} if between else {}, at_least=False))
    low, high = sorted((start, after))
    return Move(view, before, after, direction, count(sources, context, view, low, high))


def count(sources: Sources, context: Context, view: ProcessorView, after: Checkpoint, up_to: Checkpoint) -> Count:
    """Count the partition's messages in a range, by type."""
    with context.console.progress("messages counted") as progress:
        return count_between(
            sources.need(view.processor_id), sources.reader(view), after, up_to,
            cap=context.options.count_at_most, watch=progress.reach,
        )  # fmt: skip


def heed_answer(answer: conflicts.ResolveAnswer, conflict: int | None) -> None:
    """Raise for every answer but DONE."""
    match answer:
        case conflicts.ResolveAnswer.DONE:
            return
        case conflicts.ResolveAnswer.OWNER_LIVE:
            raise RefusedError("an owner became live meanwhile: stop it first; nothing was changed")
        case conflicts.ResolveAnswer.PAIR_DIFFERS:
            raise RefusedError("the stored pair is another one by now; nothing was changed, look again")
        case conflicts.ResolveAnswer.ALREADY:
            raise RefusedError(f"conflict {conflict} was decided before; nothing was changed")
        case conflicts.ResolveAnswer.UNKNOWN:
            raise RefusedError(f"conflict {conflict} waits for no decision; nothing was changed")


def tell_resource(context: Context, view: ProcessorView, verb: str, conflict: int) -> None:
    """Say how a resource hears of a decision: one that was scaled to zero for the conflict has no pod that looks."""
    holder = view.holder
    if holder is not None and not holder.cluster.startswith(LOCAL):
        context.console.note(
            f"{holder} does not see this by itself if it was scaled to zero for the conflict: "
            f"kubectl outbox {verb.format(holder.name)} -n {holder.namespace} --conflict {conflict}"
        )
