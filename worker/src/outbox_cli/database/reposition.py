"""`rewind` and `skip-to`: a preview, a question, and one recorded transaction; and `forget-source`.

Where the cursor is Snapshot, a place is a position, and what it means a snapshot range. Back: every message from that
position on is handled again, and none that was not handled is passed over. Forward: what is committed now and lies
below the position is passed over; what commits later is handled, at every position.

The database refuses while an owner is live. The pair that the person saw in the preview must still be the stored one
when the move is made, else everything is rolled back: a worker stored a checkpoint meanwhile, and the preview was of
another move.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outbox_cli.context import Context, against_database, need_reason, whoami
from outbox_cli.database.inspect import find_partitions
from outbox_cli.database.moves import Direction, Move, count, heed_answer, preview, tell_resource
from outbox_cli.database.sources import Sources
from outbox_cli.errors import Exit, RefusedError, UsageError
from outbox_core.config import Resolution, ResolutionAction
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_core.progress.snapshot_range import LOWEST_POSITION, Plan, SnapshotRange
from outbox_core.spec import Source, StartFrom, StartType
from outbox_worker.postgres import remote_target
from outbox_worker.postgres.admin.overview import ProcessorView, list_conflicts
from outbox_worker.postgres.admin.repair import is_unfinished
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import conflicts
from outbox_worker.postgres.progress.starts import start_pair, start_range
from outbox_worker.postgres.reading.range_scan import RangeScan
from outbox_worker.postgres.reading.snapshots import take_snapshot
from outbox_worker.postgres.reading.stall import list_writers

if TYPE_CHECKING:
    from argparse import Namespace

    from outbox_worker.postgres.connection import Connection


@against_database
def move_checkpoint(connection: Connection, context: Context, *, direction: Direction) -> Exit:
    """Go back, so that messages are handled again, or forward, so that they are passed over."""
    options, console = context.options, context.console
    need_reason(options)
    processor_id = context.needed_processor
    if is_unfinished(connection, context.schema):
        raise RefusedError(
            f"a repair of schema {context.schema} was begun and is not finished, so no place can be named: run "
            "`outbox repair` again first"
        )
    views = find_partitions(connection, context.schema, processor_id, options.partition)
    with Sources(connection, context) as sources:
        _refuse_consumers(sources, processor_id, direction)
        moves = _plan(connection, context, sources, views, direction)
    records = [move.record(done=not options.dry_run) for move in moves]
    # The move of one checkpoint is an object, those of a partitioned processor are a list.
    document = records if len(views) > 1 else records[0]
    if options.dry_run:
        for move in moves:
            if move.view.live:
                console.note(f"now it would be refused: pod {move.view.pod} is the live owner")
        return console.tell(document, *(move.sentence() for move in moves))
    for move in moves:
        console.note(move.sentence())
    console.confirm("Move the checkpoint?" if len(moves) == 1 else f"Move {len(moves)} checkpoints?")
    with connection.transaction():
        for move in moves:
            _carry_out(connection, context, move)
    console.tell(document, f"moved to {moves[0].place or moves[0].after}; recorded in the audit log for {whoami()}")
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
    source_connection = sources.need(context.needed_processor)
    known = {view.partition: _last_known(connection, context.schema, view) for view in views}
    if any(_is_snapshot_range(view, known[view.partition]) for view in views):
        for view in views:
            _let_move(context, view, alone=len(views) == 1)
        moves = [plan_move(sources, context, view, known[view.partition], direction) for view in views]
        # Of several ranges only those move for which there is something to do.
        return moves if len(moves) == 1 else [move for move in moves if move.count.total] or moves
    source = sources.source_of(context.needed_processor)
    after: Checkpoint = context.options.to or start_pair(source_connection, source, find_start_from(context.options))
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


def _is_snapshot_range(view: ProcessorView, known: Checkpoint | None) -> bool:
    """Say whether the cursor is Snapshot; of a row that is gone its counter tells."""
    if known is None:
        return False
    is_counter = view.pair is None and known.transaction_id == 0 and known.position > 0
    return known.snapshot_range is not None or is_counter


def _let_move(context: Context, view: ProcessorView, *, alone: bool) -> None:
    """Refuse while an owner is live, as the database would after the person was asked; heed an open conflict."""
    if context.options.dry_run:
        return
    if view.live:
        raise RefusedError(
            f"pod {view.pod} is the live owner (lease until {view.expires_at}): stop it first, "
            "with spec.suspend (`kubectl outbox pause`) or by ending the process"
        )
    _heed_conflict(context, view, alone=alone)


def _choose(views: list[ProcessorView], after: Checkpoint, direction: Direction) -> list[ProcessorView]:
    """Of several partitions only those move that are on the other side of the pair; refuse where none is."""
    if len(views) == 1:
        return views
    back = direction is Direction.BACK
    found = [view for view in views if view.pair is None or (view.pair > after if back else view.pair < after)]
    if not found:
        raise RefusedError(f"no partition is {'ahead of' if back else 'behind'} {after}: there is nothing to move")
    return found


def _check(source_connection: Connection, view: ProcessorView, after: Checkpoint, direction: Direction) -> None:
    """Raise where the move is none, goes the other way, or would lose what is in flight."""
    if view.is_gone and view.open_conflict is None:
        raise RefusedError(
            f"the checkpoint's row of {view.processor_id} partition {view.partition} is gone: start the processor, "
            "which records that as a conflict and handles nothing, then decide it with `outbox rewind`"
        )
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
    number, named = view.open_conflict, context.options.conflict
    if number is None:
        if named is not None:
            raise RefusedError(f"conflict {named} is not open")
        return
    if not alone:
        raise RefusedError(
            f"conflict {number} is open in partition {view.partition}: decide it by itself, with "
            f"--partition {view.partition}"
        )
    if named not in (None, number):
        raise RefusedError(f"conflict {number} is open, not {named}")
    if context.options.yes and named is None:
        raise RefusedError(f"conflict {number} is open: look at it, and say --conflict {number}")
    context.console.note(f"conflict {number} is decided by this")


def _carry_out(connection: Connection, context: Context, move: Move) -> None:
    """Move, and compare what was moved with what was shown."""
    view, reason, schema = move.view, context.options.reason, context.schema
    key = ProcessorKey(schema, view.processor_id, view.partition)
    if view.open_conflict is not None:
        decision = Resolution(
            conflict_id=view.open_conflict,
            action=ResolutionAction.REWIND,
            pair=_to_pair(move),
            decided_by=f"{whoami()}: {reason}",
        )
        heed_answer(conflicts.resolve(connection, schema, decision), view.open_conflict)
    else:
        told = f"{context.options.verb}: {reason}"
        if not conflicts.rewind(connection, key, move.after, reason=told, decided_by=whoami()):
            heed_answer(conflicts.ResolveAnswer.OWNER_LIVE, None)
    before = conflicts.fetch_moved_from(connection, key)
    if before != move.before:
        raise RefusedError(
            f"the stored pair was {before} when it came to it, not {move.before}: a worker was active meanwhile; "
            "nothing was changed, look again"
        )


def _to_pair(move: Move) -> str:
    """Say where to as the database takes it from a person: a snapshot range to go back to is 0:POSITION."""
    snapshot_range = move.after.snapshot_range
    if snapshot_range is None:
        return str(move.after)
    return str(Checkpoint(0, (LOWEST_POSITION if snapshot_range.position is None else snapshot_range.position) + 1))


@against_database
def forget_source(connection: Connection, context: Context) -> Exit:
    """Let the next claim write down which database it reads."""
    options, console = context.options, context.console
    need_reason(options)
    key = ProcessorKey(context.schema, context.needed_processor)
    written = remote_target.fetch_source(connection, key)
    if written is None:
        raise RefusedError(f"processor {key.processor_id} reads the database that holds its checkpoint")
    record = {"processorId": key.processor_id, "source": written.identity, "described": written.described}
    sentence = (
        f"{key.processor_id} reads {written.described}; its checkpoint would count for the database that is read next"
    )
    if options.dry_run:
        return console.tell(record | {"done": False}, sentence)
    console.note(sentence)
    console.confirm("Is the new source the same outbox, with the same transaction ids?")
    answer = remote_target.forget_source(connection, key, reason=options.reason, decided_by=whoami())
    if answer == StoreAnswer.NOT_OWNER:
        heed_answer(conflicts.ResolveAnswer.OWNER_LIVE, None)
    if answer == StoreAnswer.IGNORED:
        raise RefusedError("it is forgotten already; the next claim writes down what it reads")
    return console.tell(record | {"done": True}, f"forgotten; recorded in the audit log for {whoami()}")


def plan_move(
    sources: Sources, context: Context, view: ProcessorView, known: Checkpoint | None, direction: Direction
) -> Move:
    """Find the checkpoint to move to, and count the messages that it concerns.

    Where the checkpoint's row is gone, `known` has the counter that was expected and no range: it is taken that all
    that is committed by now was examined, as the database does (sql/functions/conflicts.sql).

    """
    back = direction is Direction.BACK
    if not back and view.open_conflict is not None:
        raise RefusedError(f"conflict {view.open_conflict} is open: accept it or rewind first, then skip")
    if known is None or (known.snapshot_range is None and view.pair is not None):
        raise RefusedError(f"the checkpoint of {view.processor_id} is no snapshot range")
    connection, source = sources.need(view.processor_id), sources.source_of(view.processor_id)
    scan = RangeScan.whole(source) if sources.has_remote_target(view.processor_id) else None
    now = take_snapshot(connection, scan, None if known.snapshot_range is None else known.snapshot_range.end)
    snapshot_range = known.snapshot_range or SnapshotRange(now)
    position = _find_position(connection, context, source)
    if known.snapshot_range is None and position is not None:
        context.console.note(
            f"the checkpoint's row is gone, and what was examined with it: what is committed by now below position "
            f"{position} counts as handled"
        )
    if back:
        target = SnapshotRange() if position is None else snapshot_range.rewound(position)
        first = (
            SnapshotRange()
            if snapshot_range.end is None
            else SnapshotRange(None, snapshot_range.end, target.position or LOWEST_POSITION)
        )
        last = SnapshotRange(snapshot_range.end, plan=Plan.BY_POSITION)
    else:
        target = SnapshotRange(now) if position is None else snapshot_range.skipped(position, now)
        reached = LOWEST_POSITION if snapshot_range.position is None else snapshot_range.position
        first, last = SnapshotRange(snapshot_range.lower, now, reached), target
    concerned = count(sources, context, view, Checkpoint(0, 1, first), Checkpoint(0, 2, last))
    ends = "the beginning" if back else "the end"
    place = ends if position is None else f"position {position}"
    return Move(view, view.pair, Checkpoint(0, known.position + 1, target), direction, concerned, place)


def _find_position(connection: Connection, context: Context, source: Source) -> int | None:
    """Return the position that the options mean; None: the beginning or end."""
    options = context.options
    if options.to is not None:
        raise UsageError(
            "--to names a pair, and this processor's cursor is Snapshot: say --to-position, --to-time, or the "
            "beginning or end"
        )
    if options.to_position is not None:
        return int(options.to_position)
    if options.to_time is None:
        return None
    start = start_range(connection, source, find_start_from(options))
    if start.position is None:
        raise RefusedError(f"nothing was stored since {options.to_time}")
    return start.position + 1


def find_start_from(options: Namespace) -> StartFrom:
    """Say the place that is named other than by a pair as a resource would."""
    if options.to_position is not None:
        return StartFrom(type=StartType.POSITION, position=options.to_position)
    if options.to_time is not None:
        return StartFrom(type=StartType.TIMESTAMP, timestamp=options.to_time)
    return StartFrom(type=StartType.END if options.to_end else StartType.BEGINNING)
