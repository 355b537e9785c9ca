"""PURE: the table of what runs under chaos: one entry for each mode and target, and what is promised for it.

All cases read one outbox (or, with a queue of their own, the same messages from it), each as a processor of its own. To
add one, add an entry to CASES; what a worker is told of it is in `config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, LiteralString

from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_SECONDS: Final = 3.0
PARTITIONS: Final = 4
COUNTS: Final = (4, 5, 6, 7, 8)
"""Of partitions, when their number is changed: never fewer than there can be replicas."""
SLOTS: Final = 64
RECOVERY_SECONDS: Final = LEASE_SECONDS + 5
"""Mode Competing: what a killed consumer had in hand is handled after so long, at most."""
TAKEOVER_SECONDS: Final = LEASE_SECONDS + 10
"""The other modes: partitions of a killed or frozen process have an effect after so long, at most. The lease and the
standby's wait are 4 s of it; a machine that is busy with all cases needs the rest."""

CHECKPOINTS: Final[LiteralString] = """
SELECT processor_id, partition, ARRAY[last_processed_transaction_id::text::numeric, last_processed_position]
  FROM outbox.processor_checkpoints
"""
"""Rows (processor, partition, numbers): the pair, (0, counter) with the cursor Snapshot. Compared as a whole."""


class Target(StrEnum):
    """Where the effects are, and so how the ledger reads them."""

    SQL = "sql"
    PYTHON = "python"
    RABBITMQ = "rabbitmq"
    STREAM = "rabbitmqStream"
    KAFKA = "kafka"

    @property
    def is_database(self) -> bool:
        """Effects are rows, made in the transaction of the checkpoint."""
        return self in (Target.SQL, Target.PYTHON)


class Ending(StrEnum):
    """What a case's checkpoints say when everything is handled."""

    AT_LAST = "the pair of each partition's last message"
    BEYOND_LAST = "no pair below any message's"
    EMPTY = "nothing: the queue is empty, and its messages have no place among the outbox'"
    SNAPSHOT_RANGE = "a snapshot range that holds every message"


@dataclass(frozen=True, slots=True)
class Case:
    """One processor.

    Attributes:
        order: what the ledger checks: the pair's order, the order within each key, or none.
        partitions: checkpoints and leases that it has; 1 where it is not partitioned.
        replicas: worker processes at the start.
        delivery: what differs from what `config` writes for all.
        source: the same.
        fenced: leases have epochs, and effects name the epoch: no effect of an older one may come after a newer one's.
        apart: effects, checkpoints and leases are on another server than the messages.
        pooled: PgBouncer, in transaction mode, is between it and the messages: it hides a crash from who is idle.
        queue: the queue from which it takes the messages, instead of the outbox.
        changes: the number of partitions is changed while it runs.
        failing: some messages fail for a while by what they say; those of other keys go on.
        once: though its target is no database, no message may be there twice: by numbers, or by transactions of Kafka.
        shared: so many processors more run in its processes, as with `worker.shared`. They have tables of their own.

    """

    name: str
    mode: str
    target: Target
    order: Order
    partitions: int = 1
    replicas: int = 2
    delivery: dict[str, Any] = field(default_factory=dict)
    source: dict[str, Any] = field(default_factory=dict)
    fenced: bool = True
    apart: bool = False
    pooled: bool = False
    queue: str = ""
    ending: Ending = Ending.AT_LAST
    changes: bool = False
    failing: bool = False
    once: bool = False
    shared: int = 0

    @property
    def companions(self) -> tuple[Case, ...]:
        """The other processors of its processes. No fault is aimed at them, and every one strikes them too."""
        return tuple(
            replace(self, name=f"{self.name}-{number}", target=Target.SQL, shared=0)
            for number in range(1, self.shared + 1)
        )

    @property
    def exact(self) -> bool:
        """No effect may stand twice."""
        return self.once or self.target.is_database

    @property
    def table(self) -> str:
        """The table of its effects, in schema `chaos`."""
        return "handled_" + self.name.replace("-", "_")

    @property
    def has_target_connection(self) -> bool:
        """There is a connection to its target beside the one to the messages."""
        return self.apart or not self.target.is_database


_DIVIDED: Final = {"mode": "Partitioned", "partitions": {"count": PARTITIONS}}
_SNAPSHOT: Final = {"cursor": "Snapshot"}
_PAIRS: Final = {"cursor": "TransactionOrder"}


def _ordered(target: Target) -> Case:
    return Case(f"ordered-{target}", "Ordered", target, Order.TOTAL, source=_PAIRS)


def _partitioned(target: Target) -> Case:
    return Case(
        f"partitioned-{target}", "Partitioned", target, Order.KEY, PARTITIONS, replicas=3, delivery=_DIVIDED,
        source=_PAIRS, changes=True,
    )  # fmt: skip


def _snapshot_ordered(target: Target, *, pooled: bool = False) -> Case:
    return Case(
        f"snapshot-ordered-{target}{'-pooled' if pooled else ''}", "Ordered, Snapshot", target, Order.COMMIT,
        source=_SNAPSHOT, ending=Ending.SNAPSHOT_RANGE, pooled=pooled,
    )  # fmt: skip


def _snapshot_partitioned(target: Target) -> Case:
    return Case(
        f"snapshot-partitioned-{target}", "Partitioned, Snapshot", target, Order.COMMIT, PARTITIONS, replicas=3,
        delivery=_DIVIDED, source=_SNAPSHOT, ending=Ending.SNAPSHOT_RANGE, changes=True,
    )  # fmt: skip


def _competing(target: Target, *, queue: bool = False) -> Case:
    name = f"{'queue' if queue else 'competing'}-{target}"
    settings: dict[str, Any] = {"leaseDuration": f"{LEASE_SECONDS:g}s"}
    if queue:
        settings["queue"] = f"of_{target}"
    return Case(
        name, "Competing, queue" if queue else "Competing", target, Order.NONE, replicas=3, fenced=False,
        delivery={"mode": "Competing", "competing": settings}, queue=settings.get("queue", ""),
        ending=Ending.EMPTY if queue else Ending.BEYOND_LAST,
    )  # fmt: skip


def _apart(target: Target) -> Case:
    return Case(f"apart-ordered-{target}", "Ordered, apart", target, Order.TOTAL, source=_PAIRS, apart=True)


def _apart_snapshot(target: Target) -> Case:
    return Case(
        f"apart-snapshot-{target}", "Ordered, apart", target, Order.COMMIT, source=_SNAPSHOT,
        ending=Ending.SNAPSHOT_RANGE,
        apart=True,
    )  # fmt: skip


def _apart_partitioned(target: Target) -> Case:
    return Case(
        f"apart-partitioned-{target}", "Partitioned, apart", target, Order.KEY, PARTITIONS, replicas=3,
        delivery=_DIVIDED, source=_PAIRS, apart=True,
    )  # fmt: skip


def _shared(case: Case) -> Case:
    """The same case in processes that it shares with other processors."""
    return replace(case, name=f"shared-{case.name}", mode=f"{case.mode}, shared", shared=3)


_AGAIN: Final = {"retry": {"maxAttempts": 1000, "initialBackoff": "50ms", "maxBackoff": "500ms"}}
"""A message that fails is tried again until it does not."""


def _failing(case: Case) -> Case:
    """The same case, where some messages fail for a while, each alone: none is lost, none overtakes one of its key."""
    order = case.order if case.order is Order.NONE else Order.KEY
    blocks = {} if case.mode == "Competing" else {"blocks": "Key"}
    return replace(
        case, name=f"failing-{case.name}", failing=True, order=order, delivery=case.delivery | blocks | _AGAIN
    )  # fmt: skip


def _in_topic(case: Case) -> Case:
    """The same case into Kafka, which has an order within each key only."""
    name = "kafka-" + case.name.removesuffix(f"-{Target.KAFKA}")
    return replace(
        case, name=name, replicas=2, order=case.order if case.order in (Order.COMMIT, Order.NONE) else Order.KEY
    )


def _in_topic_once(case: Case) -> Case:
    """The same case by transactions of Kafka."""
    case = _in_topic(case)
    return replace(
        case, name=case.name.replace("kafka-", "kafka-once-"), mode=f"{case.mode}, once", once=True,
        delivery=case.delivery | {"guarantee": "Transactional"},
    )  # fmt: skip


def _in_stream(case: Case) -> Case:
    """The same case into a stream; a change of partitions begins other numbers, and may repeat what a kill left."""
    name = "stream-" + case.name.removesuffix(f"-{Target.STREAM}")
    return replace(case, name=name, mode=f"{case.mode}, once", replicas=2, changes=False, once=True)


_ANY_MODE: Final = (Target.SQL, Target.PYTHON, Target.RABBITMQ)
CASES: Final = (
    *(_ordered(target) for target in _ANY_MODE),
    *(_partitioned(target) for target in _ANY_MODE),
    *(_snapshot_ordered(target) for target in _ANY_MODE),
    _snapshot_ordered(Target.SQL, pooled=True),
    *(_snapshot_partitioned(target) for target in _ANY_MODE),
    *(_competing(target) for target in _ANY_MODE),
    _competing(Target.SQL, queue=True),
    _competing(Target.RABBITMQ, queue=True),
    _apart(Target.SQL),
    _apart(Target.PYTHON),
    _apart_snapshot(Target.SQL),
    _apart_partitioned(Target.SQL),
    _apart_partitioned(Target.PYTHON),
    _shared(_ordered(Target.SQL)),
    _shared(_snapshot_ordered(Target.RABBITMQ)),
    _shared(_competing(Target.SQL)),
    _failing(_ordered(Target.PYTHON)),
    _failing(_partitioned(Target.PYTHON)),
    _failing(_competing(Target.PYTHON)),
    _in_stream(_ordered(Target.STREAM)),
    _in_stream(_partitioned(Target.STREAM)),
    _in_topic(_ordered(Target.KAFKA)),
    _in_topic(_partitioned(Target.KAFKA)),
    _in_topic(_snapshot_ordered(Target.KAFKA)),
    _in_topic(_competing(Target.KAFKA)),
    _in_topic_once(_ordered(Target.KAFKA)),
    _in_topic_once(_partitioned(Target.KAFKA)),
    _in_topic_once(_snapshot_partitioned(Target.KAFKA)),
)


def select_cases(names: Sequence[str]) -> tuple[Case, ...]:
    """Return the cases of these names, or all; a name ending in `*` selects what begins with it.

    Raises:
        ValueError: there is no such case.

    """
    if not names:
        return CASES
    for name in names:
        if not any(_fits(case, name) for case in CASES):
            known = ", ".join(case.name for case in CASES)
            raise ValueError(f"no case {name!r}: there are {known}; ordered-* selects all that begin so")
    return tuple(case for case in CASES if any(_fits(case, name) for name in names))


def _fits(case: Case, name: str) -> bool:
    return case.name.startswith(name[:-1]) if name.endswith("*") else case.name == name
