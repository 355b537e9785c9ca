"""PURE: what is wrong with one case, by what producers committed, what its target holds and what the observer saw."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.tools.chaos.cases import SLOTS, Ending
from tests.tools.ledger.account import Account, compare
from tests.tools.ledger.history import find_double_owners, find_moves_back, find_stale_effects
from tests.tools.ledger.plant import check_history, check_list

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from tests.tools.chaos.cases import Case
    from tests.tools.ledger.account import Handled
    from tests.tools.ledger.commitlog import Committed
    from tests.tools.ledger.history import Effect, Held, Stored


LINE: Final = 2**63 - 1
"""The position of a barrier."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known of one case.

    Attributes:
        handled: traces in its target, in the target's order.
        stored: checkpoints that the observer saw, in order of time.
        held: leases that the observer saw, in order of time.
        effects: when each trace came and, where the target says so, in which epoch.
        final: the checkpoint of each partition at the end.
        unexamined: messages that no snapshot range holds at the end (cursor Snapshot), or that are left in a queue.
        partitions: into how many the case is divided at the end.
        complaints: what was wrong with the processes themselves, or needs a person.

    """

    handled: Sequence[Handled]
    stored: Sequence[Stored] = ()
    held: Sequence[Held] = ()
    effects: Sequence[Effect] = ()
    final: dict[int, tuple[int, ...]] = field(default_factory=dict)
    unexamined: dict[int, int] = field(default_factory=dict)
    partitions: int = 1
    complaints: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The account, and everything that speaks against the case (empty: it kept its promises)."""

    case: Case
    account: Account
    violations: tuple[str, ...]
    moved_back: int = 0


def judge(case: Case, produced: Sequence[Committed], evidence: Evidence) -> Verdict:
    """Hold the evidence against what the case promises."""
    account = compare(case.name, produced, evidence.handled, order=case.order)
    kept = account.is_exact() if case.exact else account.is_at_least_once()
    violations = [] if kept else _name_findings(case, account)
    moved_back = find_moves_back(evidence.stored)
    violations += moved_back
    if case.fenced:
        violations += find_double_owners(evidence.held)
        if case.target.is_database:
            violations += find_stale_effects(evidence.effects)
    violations += find_not_at_end(case, produced, evidence)
    return Verdict(case, account, (*evidence.complaints, *violations), len(moved_back))


def _name_findings(case: Case, account: Account) -> list[str]:
    """Name what is wrong; a duplicate that is allowed is not."""
    findings = [text for text in account.findings if case.exact or not re.search(r" stands \d+ times$", text)]
    return findings or ["the account is wrong"]


def find_missing(case: Case, evidence: Evidence) -> list[str]:
    """Name what was not seen: without it the judge finds nothing, whatever happened."""
    sampled = {sample.partition for sample in evidence.stored}
    missing = [
        f"no sample of the checkpoint of partition {number}" for number in evidence.final if number not in sampled
    ]
    if not evidence.stored:
        missing.append("no sample of a checkpoint")
    if case.fenced and not evidence.held:
        missing.append("no sample of a lease")
    if not evidence.effects:
        missing.append("no effect with the time of its commit")
    return [f"{case.name}: {what}" for what in missing]


def check_judge(case: Case, produced: Sequence[Committed], evidence: Evidence, random: Random) -> list[str]:
    """Plant every fault into copies of the evidence; return those that were overlooked."""
    effects = evidence.effects if case.fenced and case.target.is_database else ()
    overlooked = check_list(produced, evidence.handled, random, order=case.order) if evidence.handled else ["empty"]
    return overlooked + check_history(evidence.stored, evidence.held if case.fenced else (), effects, random)


def find_not_at_end(case: Case, produced: Sequence[Committed], evidence: Evidence) -> list[str]:
    """Name each partition whose checkpoint does not say that everything is handled."""
    last = last_pairs(produced, evidence.partitions)
    left = [f"{count} messages of partition {number} are left" for number, count in evidence.unexamined.items()]
    if case.ending in (Ending.SNAPSHOT_RANGE, Ending.EMPTY):
        return left + [f"partition {number} has no checkpoint" for number in last if number not in evidence.final]
    return left + [
        f"partition {partition} ends at {evidence.final.get(partition)}, its last message is {pair}"
        for partition, pair in last.items()
        if not _is_at_end(case, evidence.final.get(partition), pair)
    ]


def _is_at_end(case: Case, final: tuple[int, ...] | None, last: tuple[int, int]) -> bool:
    if final is None or final == last:
        return final == last
    # A partition that had nothing since its number was changed stays at the barrier, which is no message's pair; and
    # one that is idle passes what others have, for `outbox prune`, where the messages are in the same database.
    passes = case.partitions > 1 and not case.apart
    beyond = case.ending is Ending.BEYOND_LAST or (passes and final[1] == LINE)
    return beyond and final > last


def last_pairs(produced: Sequence[Committed], partitions: int) -> dict[int, tuple[int, int]]:
    """Return the pair of each partition's last message."""
    last: dict[int, tuple[int, int]] = {}
    for message in produced:
        partition = partition_of(message.key, partitions)
        last[partition] = max(message.pair, last.get(partition, message.pair))
    return last


def partition_of(key: str, count: int) -> int:
    """Return the partition of a key, as docs/partitioned.md states it; the product's own function is not asked."""
    return hashlib.sha256(key.encode()).digest()[0] % SLOTS % count
