"""`rewind`, `skip-to`, and what both share with accepting: a preview, a question, and one recorded transaction.

The database refuses while an owner is live. The pair that the person saw in the preview must still be the stored one
when the move is made, else everything is rolled back: a worker stored a checkpoint meanwhile, and the preview was of
another move.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from outbox_cli.command import against_database, need_reason, whoami
from outbox_cli.console import format_counts
from outbox_cli.database.inspect import find_partitions
from outbox_cli.database.sources import Sources
from outbox_cli.database.window_reposition import plan_move
from outbox_cli.errors import Exit, RefusedError
from outbox_core.config import Resolution, ResolutionAction
from outbox_core.progress.checkpoint import BEGINNING, Checkpoint, StoreAnswer
from outbox_core.progress.snapshot_range import LOWEST_POSITION
from outbox_core.spec import StartFrom, StartType
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.admin.overview import list_audit_log, list_conflicts
from outbox_worker.postgres.admin.preview import Count, count_between
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import conflicts
from outbox_worker.postgres.progress.checkpoints import start_pair
from outbox_worker.postgres.reading.writers import list_writers

if TYPE_CHECKING:
    from outbox_cli.console import Record
    from outbox_cli.context import Context, Subject
    from outbox_core.progress.snapshot_range import SnapshotRange
    from outbox_core.spec import Source
    from outbox_worker.postgres.admin.overview import ProcessorView
    from outbox_worker.postgres.connection import Connection


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
    sources: Sources, context: Context, view: ProcessorView, before: Checkpoint | None, after: Checkpoint
) -> Move:
    """Count what lies between the two pairs."""
    start = BEGINNING if before is None else before
    if after.window is not None:
        # Counters count the messages examined.
        between = abs(after.position - start.position)
        count = Count({"any type": between} if between else {}, at_least=False)
        return Move(view, before, after, _way(start, after), count)
    direction = _way(start, after)
    low, high = (start, after) if direction is Direction.FORWARD else (after, start)
    reader, source_connection = sources.reader(view), sources.need(view.processor_id)
    with context.console.progress("messages counted") as progress:
        count = count_between(
            source_connection, reader, low, high, cap=context.options.count_at_most, watch=progress.reach
        )
    return Move(view, before, after, direction, count)


def _way(start: Checkpoint, after: Checkpoint) -> Direction:
    return Direction.FORWARD if after > start else Direction.BACK


def find_partition(connection: Connection, subject: Subject, partition: int) -> ProcessorView:
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
def rewind(connection: Connection, context: Context) -> Exit:
    """Go back: messages are handled again."""
    return _move(connection, context, Direction.BACK)


@against_database
def skip_to(connection: Connection, context: Context) -> Exit:
    """Go forward: messages are passed over."""
    return _move(connection, context, Direction.FORWARD)


def _move(connection: Connection, context: Context, direction: Direction) -> Exit:
    options, console, subject = context.options, context.console, context.subject
    need_reason(options)
    views = _find_views(connection, subject, options.partition)
    several = len(views) > 1
    with Sources(connection, context) as sources:
        _refuse_consumers(sources, subject.needed, direction)
        moves = _plan(connection, context, sources, views, direction)
    if options.dry_run:
        console.document(_document(moves, several=several, done=False))
        for move in moves:
            console.say(move.sentence())
            if move.view.live:
                console.note(f"now it would be refused: pod {move.view.pod} is the live owner")
        return Exit.DONE
    for move in moves:
        console.note(move.sentence())
    console.confirm("Move the checkpoint?" if len(moves) == 1 else f"Move {len(moves)} checkpoints?")
    _carry_out(connection, context, moves)
    console.document(_document(moves, several=several, done=True))
    console.say(f"moved to {moves[0].place or moves[0].after}; recorded as an act of {whoami()}")
    for move in moves:
        if move.view.open_conflict is not None:
            tell_resource(context, move.view, f"rewind {{}} --to {_to_pair(move)}", move.view.open_conflict)
    return Exit.DONE


def _refuse_consumers(sources: Sources, processor_id: str, direction: Direction) -> None:
    """Raise where batches are handed out: no checkpoint says what is done, so none can be moved."""
    if processor_id not in sources.queues:
        return
    queue = sources.queues[processor_id]
    if direction is Direction.FORWARD:
        remedy = "to be rid of messages give them up as they fail, with delivery.whenExhausted: Skip"
    elif queue is None:
        remedy = "to handle messages again use another processorId with startFrom; `outbox redrive` does dead letters"
    else:
        remedy = (
            f"to handle messages of queue {queue!r} again insert them anew: what is done is deleted; `outbox redrive` "
            "does dead letters"
        )
    raise RefusedError(
        f"{processor_id} is in mode Competing: batches are handed out, and no checkpoint says which are done; {remedy}"
    )


def _plan(
    connection: Connection,
    context: Context,
    sources: Sources,
    views: list[ProcessorView],
    direction: Direction,
) -> list[Move]:
    """Decide which checkpoints move where, and refuse what must not; one kind of cursor holds for all partitions."""
    source_connection = sources.need(context.subject.needed)
    known = {view.partition: _last_known(connection, context.subject.schema, view) for view in views}
    if any(_is_window(view, known[view.partition]) for view in views):
        for view in views:
            _let_move(context, view, alone=len(views) == 1)
        moves = [_plan_window(sources, context, view, known[view.partition], direction) for view in views]
        # Of several windows only those move for which there is something to do.
        return moves if len(moves) == 1 else [move for move in moves if move.count.total] or moves
    after = _wanted(source_connection, context, sources.source_of(context.subject.needed))
    chosen = _choose(views, after, direction)
    for view in chosen:
        _check(source_connection, view, after, direction)
        _let_move(context, view, alone=len(chosen) == 1)
    return [replace(preview(sources, context, view, known[view.partition], after), before=view.pair) for view in chosen]


def _last_known(connection: Connection, schema: str, view: ProcessorView) -> Checkpoint | None:
    """Return the stored checkpoint; where its row is gone, the one that the open conflict says was expected."""
    if view.pair is not None or view.open_conflict is None:
        return view.pair
    (conflict,) = list_conflicts(connection, schema, conflict_id=view.open_conflict)
    return conflict.expected


def _is_window(view: ProcessorView, known: Checkpoint | None) -> bool:
    """Say whether the cursor is Snapshot; of a row that is gone its counter tells."""
    if known is None or known.window is not None:
        return known is not None
    return view.pair is None and known.transaction_id == 0 and known.position > 0


def _let_move(context: Context, view: ProcessorView, *, alone: bool) -> None:
    if not context.options.dry_run:
        refuse_live(view)
        _heed_conflict(context, view, alone=alone)


def _plan_window(
    sources: Sources, context: Context, view: ProcessorView, known: Checkpoint | None, direction: Direction
) -> Move:
    if direction is Direction.FORWARD and view.open_conflict is not None:
        raise RefusedError(f"conflict {view.open_conflict} is open: accept it or rewind first, then skip")
    after, count, position = plan_move(sources, context, view, known, back=direction is Direction.BACK)
    ends = "the beginning" if direction is Direction.BACK else "the end"
    place = ends if position is None else f"position {position}"
    return Move(view, view.pair, after, direction, count, place)


def _document(moves: list[Move], *, several: bool, done: bool) -> Any:
    """Write the move of one checkpoint as an object, those of a partitioned processor as a list."""
    records = [move.record(done=done) for move in moves]
    return records if several else records[0]


def _find_views(connection: Connection, subject: Subject, partition: int | None) -> list[ProcessorView]:
    """Read the partition that is named, or all of the processor's."""
    if partition is not None:
        return [find_partition(connection, subject, partition)]
    _ = subject.needed
    return find_partitions(connection, subject)


def _choose(views: list[ProcessorView], after: Checkpoint, direction: Direction) -> list[ProcessorView]:
    """Of several partitions only those move that are on the other side of the pair.

    Raises:
        RefusedError: none is.

    """
    if len(views) == 1:
        return views
    back = direction is Direction.BACK
    found = [view for view in views if view.pair is None or (view.pair > after if back else view.pair < after)]
    if not found:
        raise RefusedError(f"no partition is {'ahead of' if back else 'behind'} {after}: there is nothing to move")
    return found


def _wanted(source_connection: Connection, context: Context, source: Source) -> Checkpoint:
    """Find the pair that the options mean."""
    options = context.options
    if options.to is not None:
        pair: Checkpoint = options.to
        return pair
    if options.to_position is not None:
        start = StartFrom(type=StartType.POSITION, position=options.to_position)
    elif options.to_time is not None:
        start = StartFrom(type=StartType.TIMESTAMP, timestamp=options.to_time)
    else:
        start = StartFrom(type=StartType.END if options.to_end else StartType.BEGINNING)
    return start_pair(source_connection, source, start)


def _check(source_connection: Connection, view: ProcessorView, after: Checkpoint, direction: Direction) -> None:
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
    high_water_mark = list_writers(source_connection).high_water_mark
    if after.transaction_id >= int(high_water_mark):
        raise RefusedError(
            f"{after} is not settled: transactions from id {high_water_mark} on are still open or to come, and what "
            f"they commit "
            "below that pair would never be read; the furthest safe place is --to-end of skip-to"
        )


def _heed_conflict(context: Context, view: ProcessorView, *, alone: bool) -> None:
    """A conflict that is open is decided by the same act; who does not look must name it."""
    if view.open_conflict is not None and not alone:
        raise RefusedError(
            f"conflict {view.open_conflict} is open in partition {view.partition}: decide it by itself, with "
            f"--partition {view.partition}"
        )
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


def _carry_out(connection: Connection, context: Context, moves: list[Move]) -> None:
    """Move, and compare what was moved with what was shown; one transaction for all partitions."""
    with connection.transaction():
        for move in moves:
            _carry_out_one(connection, context, move)


def _carry_out_one(connection: Connection, context: Context, move: Move) -> None:
    view, reason, schema = move.view, context.options.reason, context.subject.schema
    if view.open_conflict is not None:
        decision = Resolution(
            conflict_id=view.open_conflict,
            action=ResolutionAction.REWIND,
            pair=_to_pair(move),
            decided_by=f"{whoami()}: {reason}",
        )
        heed_answer(conflicts.resolve(connection, schema, decision), view.open_conflict)
    else:
        key = ProcessorKey(schema, view.processor_id, view.partition)
        told = f"{context.options.verb}: {reason}"
        if not conflicts.rewind(connection, key, move.after, reason=told, decided_by=whoami()):
            heed_answer(conflicts.ResolveAnswer.OWNER_LIVE, None)
    (act,) = list_audit_log(connection, schema, view.processor_id, limit=1)
    if act.before != move.before:
        raise RefusedError(
            f"the stored pair was {act.before} when it came to it, not {move.before}: a worker was active meanwhile; "
            "nothing was changed, look again"
        )


def _to_pair(move: Move) -> str:
    return str(move.after if move.after.window is None else _first_position(move.after.window))


def tell_resource(context: Context, view: ProcessorView, verb: str, conflict: int) -> None:
    """Say how a resource hears of a decision: one that was scaled to zero for the conflict has no pod that looks."""
    holder = view.holder
    if holder is not None and not holder.cluster.startswith(LOCAL):
        context.console.note(
            f"{holder} does not see this by itself if it was scaled to zero for the conflict: "
            f"kubectl outbox {verb.format(holder.name)} -n {holder.namespace} --conflict {conflict}"
        )


def _first_position(window: SnapshotRange) -> Checkpoint:
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
            raise RefusedError(f"conflict {conflict} waits for no decision; nothing was changed")


@against_database
def forget_source(connection: Connection, context: Context) -> Exit:
    """Let the next claim write down which database it reads."""
    options, console, subject = context.options, context.console, context.subject
    need_reason(options)
    key = ProcessorKey(subject.schema, subject.needed)
    written = remote_target.fetch_source(connection, key)
    if written is None:
        raise RefusedError(f"processor {key.processor_id} reads the database that holds its checkpoint")
    record = {"processorId": key.processor_id, "source": written.identity, "described": written.described}
    sentence = (
        f"{key.processor_id} reads {written.described}; its checkpoint would count for the database that is read next"
    )
    if options.dry_run:
        console.document(record | {"done": False})
        console.say(sentence)
        return Exit.DONE
    console.note(sentence)
    console.confirm("Is the new source the same outbox, with the same transaction ids?")
    answer = remote_target.forget_source(connection, key, reason=options.reason, decided_by=whoami())
    if answer == StoreAnswer.NOT_OWNER:
        heed_answer(conflicts.ResolveAnswer.OWNER_LIVE, None)
    if answer == StoreAnswer.IGNORED:
        raise RefusedError("it is forgotten already; the next claim writes down what it reads")
    console.document(record | {"done": True})
    console.say(f"forgotten; recorded as an act of {whoami()}")
    return Exit.DONE
