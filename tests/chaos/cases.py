"""PURE: the table of what runs under chaos: one entry for each mode and target, and what is promised for it.

All cases read one outbox, each as a processor of its own. To add one, add an entry to CASES: another mode or cursor
says so in `delivery` and `source`, with the query by which its checkpoints compare. A projection into another database
names it in `database`: its effects, checkpoints and leases are read there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, LiteralString

from tests.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Sequence

LEASE_SECONDS: Final = 3.0
PARTITIONS: Final = 4
SLOTS: Final = 64

PAIRS: Final[LiteralString] = """
SELECT processor_id, partition, ARRAY[last_processed_transaction_id::text::numeric, last_processed_position]
  FROM outbox.processor_checkpoints
"""
"""Checkpoints of the cursor TransactionOrder: rows (processor, partition, numbers), the numbers compared as a whole."""


class Target(StrEnum):
    """Where the effects are, and so how the ledger reads them."""

    SQL = "sql"
    PYTHON = "python"
    RABBITMQ = "rabbitmq"


@dataclass(frozen=True, slots=True)
class Case:
    """One processor.

    Attributes:
        order: what the ledger checks: the pair's order, the order within each key, or none.
        partitions: checkpoints and leases that it has; 1 where it is not divided.
        replicas: worker processes at the start.
        delivery: what differs from `build_config`'s.
        source: the same.
        fenced: leases have epochs, and effects name the epoch: no effect of an older one may come after a newer one's.
        checkpoints: how checkpoints are read; None: the mode has none that could move back.
        database: where its effects and checkpoints are; the outbox's own, or one of its own on the same server.
        ends_at_last: the final checkpoint of a partition is the pair of its last message.

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
    checkpoints: LiteralString | None = PAIRS
    database: str = "outbox"
    ends_at_last: bool = True

    @property
    def transactional(self) -> bool:
        """Effects commit with the checkpoint: none may stand twice."""
        return self.target is not Target.RABBITMQ

    @property
    def table(self) -> str:
        """The table of its effects, in schema `chaos`."""
        return "handled_" + self.name.replace("-", "_")


def _ordered(target: Target) -> Case:
    return Case(f"ordered-{target}", "Ordered", target, Order.TOTAL)


def _partitioned(target: Target) -> Case:
    delivery = {"mode": "Partitioned", "partitions": {"count": PARTITIONS}}
    return Case(f"partitioned-{target}", "Partitioned", target, Order.KEY, PARTITIONS, replicas=3, delivery=delivery)


CASES: Final = (
    _ordered(Target.SQL),
    _ordered(Target.PYTHON),
    _ordered(Target.RABBITMQ),
    _partitioned(Target.SQL),
    _partitioned(Target.PYTHON),
    _partitioned(Target.RABBITMQ),
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


def build_config(case: Case) -> dict[str, Any]:
    """Write the file that the operator would write for the case's resource."""
    return {
        "resource": {"cluster": "chaos", "namespace": "chaos", "name": case.name, "uid": f"uid-{case.name}"},
        "generation": 1,
        "processorId": case.name,
        "source": {"connection": {"secretRef": {"name": "db"}}} | case.source,
        "delivery": {
            "pollInterval": "100ms",
            "leaseDuration": f"{LEASE_SECONDS:g}s",
            "batchSize": 50,
            "retry": {"initialBackoff": "50ms", "maxBackoff": "500ms"},
        }
        | case.delivery,
        "target": _build_target(case),
    }


def _build_target(case: Case) -> dict[str, Any]:
    match case.target:
        case Target.SQL:
            return {"sql": {"statement": build_statement(case)}}
        case Target.PYTHON:
            return {"python": {"module": "orders", "function": "handle", "configMapRef": {"name": "handlers"}}}
        case Target.RABBITMQ:
            connection = {"secretRef": {"name": "broker"}}
            return {"rabbitmq": {"connection": connection, "exchange": case.name, "routingKey": "{partitionKey}"}}


_EFFECT: Final = """
INSERT INTO chaos.{table} (message_id, order_key, order_sequence, cents, partition, epoch, holder)
SELECT {columns}, chaos.partition_of(partition_key, {partitions}), lease.epoch, lease.pod
  FROM {rows}
  LEFT JOIN outbox.processor_leases lease
    ON lease.processor_id = '{name}' AND lease.partition = chaos.partition_of(partition_key, {partitions})
 ORDER BY {order}
"""
"""An effect names who held its partition when it was made, as the database had it, beside who made it (the table's
default): the ledger needs no word of the worker's for that."""


def build_statement(case: Case) -> str:
    """Return the statement of the target `sql`."""
    return _EFFECT.format(
        table=case.table,
        name=case.name,
        partitions=case.partitions,
        columns="message_id, data->>'orderKey', (data->>'sequence')::int, (data->>'cents')::int",
        rows="batch",
        order="batch.transaction_id, batch.position",
    )


def build_handler(case: Case) -> str:
    """Return the module of the target `python`."""
    statement = _EFFECT.format(
        table=case.table,
        name=case.name,
        partitions=case.partitions,
        columns="id, partition_key, sequence, cents",
        rows="unnest(%s::text[], %s::text[], %s::int[], %s::int[]) WITH ORDINALITY "
        "AS m(id, partition_key, sequence, cents, n)",
        order="n",
    )
    return f'''
STATEMENT = """{statement}"""


def handle(batch, connection):
    rows = [(m.message_id, d["orderKey"], d["sequence"], d["cents"]) for m in batch for d in [m.json()]]
    connection.execute(STATEMENT, [list(column) for column in zip(*rows)])
'''
