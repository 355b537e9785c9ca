"""Where a query goes on: the stored checkpoint against Spark's query checkpoint directory. PURE; the rules live here.

The database is the authority; the directory is a cache of what Spark planned, and the only home of the state of
stateful operators. With `stored` the row's pair, and `committed` and `planned` the ends of the directory's last
finished and last planned batch:

| case | without state | with state |
|---|---|---|
| no directory | a new one, from the stored pair | the same, if nothing was ever handled; else refused |
| the directory was begun before a person's decision on the checkpoint | a new one, from the stored pair | refused |
| the directory is of another database | a new one, from the stored pair | refused |
| committed > stored | 3: the database is older than the directory believes; a person decides | the same |
| stored = planned > committed | the batch is planned again, answered 0 and skipped | it runs again to rebuild state, \
effects are answered 0 |
| stored = committed | go on | go on |
| planned > stored, and not settled: the server lost the transactions that were planned, by a crash or a failover, and \
hands out their ids again | a new one, from the stored pair | the same, if nothing was ever handled; else it waits |
| stored elsewhere above committed | planned again; what lies at or before the stored pair is neither read nor handled \
again | refused |

A planned range is read as it was planned, also where transactions are open in it: so it is run only where all of it is
over. A query without state does not wait for that, since on an idle server the ids come back slowly; state goes with no
other range.

Nothing here compares batch ids: they start again from 0 when the directory is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outbox_core.progress.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Lineage:
    """Under what a query checkpoint directory was begun.

    Attributes:
        database: the identity of the database, a uuid that a restored copy shares.
        decisions: number of the last audit log entry about the checkpoint (accept, rewind); 0 for none.
        decided_at: when that was, in microseconds since 1970 by the database's clock; 0 for none. A database that was
            restored gives the numbers of entries that it forgot to others.

    """

    database: str
    decisions: int = 0
    decided_at: int = 0

    def is_before(self, other: Lineage) -> bool:
        """Was the last decision of the other one made after the last of this one?"""
        return self.decisions < other.decisions or self.decided_at < other.decided_at


@dataclass(frozen=True, slots=True)
class DirectoryView:
    """What a query checkpoint directory says.

    Attributes:
        lineage: under what it was begun.
        committed: end of the last batch that Spark itself noted as finished; where it was begun before the first.
        planned: end of the last batch that Spark planned; `committed` when none is under way.
        has_state: it holds state of stateful operators.

    """

    lineage: Lineage
    committed: Checkpoint
    planned: Checkpoint
    has_state: bool


class Resume(StrEnum):
    """What to do at the start of a query."""

    CONTINUE = "Continue"
    """Start the query on this directory."""
    BEGIN = "Begin"
    """Begin a new directory from the stored pair; one that is there is not used any more."""
    WAIT = "Wait"
    """Look again: transactions of the planned batch are open, or are yet to come."""
    REFUSE_AHEAD = "RefuseAhead"
    """Answer 3: the stored pair is older than what the directory has seen committed. A person decides."""
    REFUSE_STATE = "RefuseState"
    """The operators' state does not belong to the stored pair."""


@dataclass(frozen=True, slots=True)
class ResumeDecision:
    """The decision, with a sentence for people."""

    action: Resume
    message: str


_STATE_REMEDY = (
    "Restore the query checkpoint directory that belongs to the stored checkpoint, or rewind the checkpoint to where "
    "the state shall be built from; state is never guessed"
)


def decide_resume(
    directory: DirectoryView | None,
    stored: Checkpoint,
    *,
    now: Lineage,
    stateful: bool,
    untouched: bool,
    settled: bool,
) -> ResumeDecision:
    """Compare the directory with the stored pair; the table is in the module's docstring.

    Args:
        directory: what is on the volume, None when nothing is.
        stored: the checkpoint row's pair, read under our own epoch.
        now: the lineage that a directory begun now would have.
        stateful: the application's query has stateful operators.
        untouched: no batch was ever handled: the stored pair is still the start pair, or the one a person chose.
        settled: every transaction up to the directory's `planned` is over, on the server that there is now.

    """
    why = _why_unusable(directory, now)
    if directory is None or why is not None:
        if stateful and not untouched:
            return ResumeDecision(Resume.REFUSE_STATE, f"{why}, and the query has stateful operators. {_STATE_REMEDY}.")
        return ResumeDecision(Resume.BEGIN, f"{why}: a new one goes on from the stored checkpoint {stored}")
    if directory.committed > stored:
        return ResumeDecision(
            Resume.REFUSE_AHEAD,
            f"the query checkpoint directory has seen {directory.committed} committed, the stored checkpoint is "
            f"{stored}: the database is older than it was (restored, or the checkpoint was moved back)",
        )
    if (stateful or directory.has_state) and stored not in (directory.committed, directory.planned):
        return ResumeDecision(
            Resume.REFUSE_STATE,
            f"the state of the query's operators is that of {directory.committed}, the stored checkpoint is {stored}. "
            f"{_STATE_REMEDY}.",
        )
    if directory.planned > stored and not settled:
        return _plan_again(directory, stored, keeps_state=(stateful or directory.has_state) and not untouched)
    return ResumeDecision(Resume.CONTINUE, f"goes on from the stored checkpoint {stored}")


def _plan_again(directory: DirectoryView, stored: Checkpoint, *, keeps_state: bool) -> ResumeDecision:
    lost = (
        f"the server lost transactions (a crash, or a failover): a batch was planned up to {directory.planned}, and "
        "transactions up to there are open, or are yet to come"
    )
    if not keeps_state:
        return ResumeDecision(
            Resume.BEGIN, f"{lost}: a new query checkpoint directory goes on from the stored checkpoint {stored}"
        )
    return ResumeDecision(
        Resume.WAIT,
        f"{lost}. The state of the query's operators goes with that batch only: it is run once the server's oldest "
        f"open transaction is above {directory.planned.transaction_id}. Any transaction that writes brings that "
        "nearer; a rewind to the stored checkpoint builds new state from there instead",
    )


def _why_unusable(directory: DirectoryView | None, now: Lineage) -> str | None:
    if directory is None:
        return "no query checkpoint directory is there"
    if directory.lineage.database != now.database:
        return "the query checkpoint directory is that of another database"
    if directory.lineage.is_before(now):
        return "a person decided on the checkpoint after the query checkpoint directory was begun"
    return None
