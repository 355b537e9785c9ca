"""`rewind`, `skip-to`, and what both share with accepting: a preview, a question, and one recorded transaction.

The database refuses while an owner is live. The pair that the person saw in the preview must still be the stored one
when the move is made, else everything is rolled back: somebody worked in between, and the preview was of another move.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from outbox_cli.command import against_database, whoami
from outbox_cli.console import format_counts
from outbox_cli.errors import Exit, RefusedError, UsageError
from outbox_cli.looking import find_partitions
from outbox_cli.window_moving import plan_move
from outbox_core.checkpoint import BEGINNING, Checkpoint
from outbox_core.config import Resolution, ResolutionAction
from outbox_core.spec import StartFrom, StartType
from outbox_core.window import LOWEST_POSITION
from outbox_worker.postgres import conflicts
from outbox_worker.postgres.checkpoints import start_pair
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.messages import MessageReader
from outbox_worker.postgres.overview import list_acts
from outbox_worker.postgres.preview import Count, count_between
from outbox_worker.postgres.writers import list_writers

if TYPE_CHECKING:
    import psycopg

    from outbox_cli.command import Context
    from outbox_cli.console import Record
    from outbox_cli.place import Subject
    from outbox_core.window import Window
    from outbox_worker.postgres.overview import ProcessorView


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
        total = f"{self.count.total}{' or more' if self.count.at_least else ''}"
        kinds = f" ({format_counts(self.count.by_type)})" if self.count.by_type else ""
        moved = f"{self.view.processor_id} partition {self.view.partition}: {self.before or 'no checkpoint'}"
        return f"{moved} -> {self.place or self.after}: {total} messages would be {self.direction.value}{kinds}"

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
    connection: psycopg.Connection[Any],
    context: Context,
    view: ProcessorView,
    before: Checkpoint | None,
    after: Checkpoint,
) -> Move:
    """Count what lies between the two pairs."""
    start = BEGINNING if before is None else before
    if after.window is not None:
        # Counters count the messages examined.
        apart = abs(after.position - start.position)
        return Move(
            view, before, after, _way(start, after), Count({"any type": apart} if apart else {}, at_least=False)
        )
    direction = _way(start, after)
    low, high = (start, after) if direction is Direction.FORWARD else (after, start)
    reader = MessageReader(context.subject.source)
    with context.console.progress("messages counted") as progress:
        count = count_between(connection, reader, low, high, cap=context.options.count_at_most, watch=progress.reach)
    return Move(view, before, after, direction, count)


def _way(start: Checkpoint, after: Checkpoint) -> Direction:
    return Direction.FORWARD if after > start else Direction.BACK


def find_partition(connection: psycopg.Connection[Any], subject: Subject, partition: int) -> ProcessorView:
    """Read one partition of the processor that the command names.

    Raises:
        RefusedError: there is none.

    """
    _ = subject.needed
    views = find_partitions(connection, subject)
    found = next((view for view in views if view.partition == partition), None)
    if found is None:
        raise RefusedError(f"processor {subject.processor_id} has no partition {partition}")
    return found


def refuse_live(view: ProcessorView) -> None:
    """Raise while an owner is live: the database would refuse too, after the person was asked."""
    if view.live:
        raise RefusedError(
            f"pod {view.pod} is the live owner (lease until {view.expires_at}): stop it first, "
            "with spec.suspend (`kubectl outbox pause`) or by ending the process"
        )


@against_database
def rewind(connection: psycopg.Connection[Any], context: Context) -> Exit:
    """Go back: messages are handled again."""
    return _move(connection, context, Direction.BACK)


@against_database
def skip_to(connection: psycopg.Connection[Any], context: Context) -> Exit:
    """Go forward: messages are passed over."""
    return _move(connection, context, Direction.FORWARD)


def _move(connection: psycopg.Connection[Any], context: Context, direction: Direction) -> Exit:
    options, console, subject = context.options, context.console, context.subject
    if options.reason is None and not options.dry_run:
        raise UsageError("--reason is missing: it is kept with the act")
    view = find_partition(connection, subject, options.partition)
    windowed = view.pair is not None and view.pair.window is not None
    if not windowed:
        after = _wanted(connection, context)
        _check(connection, view, after, direction)
    if not options.dry_run:
        refuse_live(view)
        _heed_conflict(context, view)
    if windowed:
        move = _plan_window(connection, context, view, direction)
    else:
        move = preview(connection, context, view, view.pair, after)
    if options.dry_run:
        console.document(move.record(done=False))
        console.say(move.sentence())
        if view.live:
            console.note(f"now it would be refused: pod {view.pod} is the live owner")
        return Exit.DONE
    console.note(move.sentence())
    console.confirm("Move the checkpoint?")
    _carry_out(connection, context, move)
    console.document(move.record(done=True))
    console.say(f"moved to {move.place or move.after}; recorded as an act of {whoami()}")
    return Exit.DONE


def _plan_window(
    connection: psycopg.Connection[Any], context: Context, view: ProcessorView, direction: Direction
) -> Move:
    if direction is Direction.FORWARD and view.open_conflict is not None:
        raise RefusedError(f"conflict {view.open_conflict} is open: accept it or rewind first, then skip")
    after, count, position = plan_move(connection, context, view, back=direction is Direction.BACK)
    ends = "the beginning" if direction is Direction.BACK else "the end"
    place = ends if position is None else f"position {position}"
    return Move(view, view.pair, after, direction, count, place)


def _wanted(connection: psycopg.Connection[Any], context: Context) -> Checkpoint:
    """Find the pair that the options mean."""
    options, source = context.options, context.subject.source
    if options.to is not None:
        pair: Checkpoint = options.to
        return pair
    if options.to_position is not None:
        start = StartFrom(type=StartType.POSITION, position=options.to_position)
    elif options.to_time is not None:
        start = StartFrom(type=StartType.TIMESTAMP, timestamp=options.to_time)
    else:
        start = StartFrom(type=StartType.END if getattr(options, "to_end", False) else StartType.BEGINNING)
    return start_pair(connection, source, start)


def _check(connection: psycopg.Connection[Any], view: ProcessorView, after: Checkpoint, direction: Direction) -> None:
    """Raise where the move is none, goes the other way, or would lose what is in flight."""
    if view.pair is None and view.open_conflict is None:
        raise RefusedError(
            f"processor {view.processor_id} has no checkpoint yet: where it starts is spec.startFrom's to say"
        )
    if view.pair == after:
        raise RefusedError(f"the checkpoint is at {after} already")
    if view.pair is not None and (after > view.pair) is not (direction is Direction.FORWARD):
        other = "skip-to" if direction is Direction.BACK else "rewind"
        where = "ahead of" if after > view.pair else "behind"
        raise RefusedError(f"{after} is {where} the stored {view.pair}: that is `outbox {other}`")
    bound = list_writers(connection).bound
    if after.transaction_id >= int(bound):
        raise RefusedError(
            f"{after} is not settled: transactions from id {bound} on are still open or to come, and what they commit "
            "below that pair would never be read; the furthest safe place is --to-end of skip-to"
        )


def _heed_conflict(context: Context, view: ProcessorView) -> None:
    """A conflict that is open is decided by the same act; who does not look must name it."""
    if view.open_conflict is None:
        if context.options.conflict is not None:
            raise RefusedError(f"conflict {context.options.conflict} is not open")
        return
    if context.options.conflict not in (None, view.open_conflict):
        raise RefusedError(f"conflict {view.open_conflict} is open, not {context.options.conflict}")
    if context.options.yes and context.options.conflict is None:
        raise RefusedError(
            f"conflict {view.open_conflict} is open: look at it, and say --conflict {view.open_conflict}"
        )
    context.console.note(f"conflict {view.open_conflict} is decided by this")


def _carry_out(connection: psycopg.Connection[Any], context: Context, move: Move) -> None:
    """Move, and compare what was moved with what was shown; one transaction."""
    view, reason = move.view, context.options.reason
    schema = context.subject.schema
    with connection.transaction():
        if view.open_conflict is not None:
            decision = Resolution(
                conflict_id=view.open_conflict,
                action=ResolutionAction.REWIND,
                pair=str(move.after if move.after.window is None else _first_position(move.after.window)),
                decided_by=f"{whoami()}: {reason}",
            )
            heed_answer(conflicts.resolve(connection, schema, decision), view.open_conflict)
        else:
            key = ProcessorKey(schema, view.processor_id, view.partition)
            told = f"{context.options.verb}: {reason}"
            if not conflicts.rewind(connection, key, move.after, reason=told, decided_by=whoami()):
                heed_answer(conflicts.ResolveAnswer.OWNER_LIVE, None)
        (act,) = list_acts(connection, schema, view.processor_id, limit=1)
        if act.before != move.before:
            raise RefusedError(
                f"the stored pair was {act.before} when it came to it, not {move.before}: somebody worked meanwhile; "
                "nothing was changed, look again"
            )


def _first_position(window: Window) -> Checkpoint:
    """Say a window to go back to as the database takes it from a person: 0:POSITION."""
    return Checkpoint(0, (LOWEST_POSITION if window.position is None else window.position) + 1)


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
            raise RefusedError(f"conflict {conflict} waits for nobody; nothing was changed")
