"""What messages cost where there is little of something and where there is much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.tools.bench import growth
from tests.tools.bench.candidates.tables import PythonNumbers, SqlSums
from tests.tools.bench.case import Case
from tests.tools.bench.growth import Grown, Outbox, build_figures
from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from tests.tools.bench.case import Candidate

_FEW, _MANY = 10_000, 10_000_000
_COMPARED = "Compared is the processor time of worker and PostgreSQL, run by run."
_EIGHT: dict[str, Any] = {"mode": "Partitioned", "partitions": {"count": 8}}
_MODES: dict[str, tuple[Order, dict[str, Any], dict[str, Any]]] = {
    "Ordered, cursor Snapshot": (Order.COMMIT, {"cursor": "Snapshot"}, {}),
    "Ordered, cursor TransactionOrder": (Order.TOTAL, {"cursor": "TransactionOrder"}, {}),
    "Partitioned (8)": (Order.KEY, {}, _EIGHT),
    "Competing": (Order.NONE, {}, {"mode": "Competing"}),
}


def _by_rows() -> list[Candidate]:
    few, many = Outbox(_FEW), Outbox(_MANY)
    return [
        Grown(
            f"{name}, rows {where}", outbox, SqlSums(), order,
            source=source, delivery=delivery, behind=behind, is_much=outbox is many,
        )
        for where, behind in {"ahead": 0.0, "ahead and behind": 0.5, "behind": 1.0}.items()
        for name, (order, source, delivery) in _MODES.items()
        for outbox in (few, many)
    ]  # fmt: skip


def _by_keys() -> list[Candidate]:
    one, many = Outbox(keys=1), Outbox(keys=10_000)
    return [
        Grown(name, outbox, PythonNumbers(), order, source=source, delivery=delivery, is_much=outbox is many)
        for name, (order, source, delivery) in _MODES.items()
        for outbox in (one, many)
    ]


def _by_filter() -> list[Candidate]:
    outbox, types = Outbox(), {"messageTypes": ["OrderPlaced", "OrderPaid"]}
    return [
        Grown(name, outbox, PythonNumbers(), order, source=source | wanted, delivery=delivery, is_much=bool(wanted))
        for name, (order, source, delivery) in _MODES.items()
        for wanted in ({}, types)
    ]


def _by_partitions() -> list[Candidate]:
    outbox = Outbox()
    return [
        Grown(
            f"Partitioned, cursor {cursor}", outbox, PythonNumbers(), Order.KEY,
            source={"cursor": cursor}, delivery=_EIGHT | {"partitions": {"count": count}}, is_much=count > 2,
        )
        for cursor in ("Snapshot", "TransactionOrder")
        for count in (2, 64)
    ]  # fmt: skip


def _by_bytes() -> list[Candidate]:
    return [
        Grown(
            f"{mode}, messages of {name}", Outbox(message_bytes=size), PythonNumbers(), order,
            delivery={"mode": mode}, is_much=size > 1_000,
        )
        for mode, order in {"Ordered": Order.COMMIT, "Competing": Order.NONE}.items()
        for name, much in {"100 kB": 100_000, "5 MB": 5_000_000}.items()
        for size in (1_000, much)
    ]  # fmt: skip


ROWS = Case(
    name="growth",
    title="A table that grows",
    about=(
        f"Messages are summed by a SQL statement in batches of 1,000, where {_FEW:,} rows wait (ahead of the cursor) "
        f"or were handled before (behind it), and where {_MANY:,} do. {_COMPARED} `times as much`: 1.00 means that the "
        "table's size costs nothing."
    ),
    candidates=_by_rows,
    measure=growth.measure,
    figures=build_figures(f"{_FEW:,} rows", f"{_MANY:,} rows"),
)
KEYS = Case(
    name="growth-keys",
    title="One key, and ten thousand",
    about=(
        "A Python handler gets messages in batches of 1,000, where all have the same key and where they have 10,000. "
        f"With one key one of eight partitions has all messages. {_COMPARED}"
    ),
    candidates=_by_keys,
    measure=growth.measure,
    figures=build_figures("1 key", "10,000 keys"),
)
FILTER = Case(
    name="growth-filter",
    title="No filter, and one that lets everything through",
    about=(
        "A Python handler gets messages in batches of 1,000, of all types and of two types that all messages have. "
        f"{_COMPARED}"
    ),
    candidates=_by_filter,
    measure=growth.measure,
    figures=build_figures("no filter", "a filter"),
)
PARTITIONS = Case(
    name="growth-partitions",
    title="Two partitions, and 64",
    about=f"A Python handler gets messages in a process with 2 and with 64 partitions. {_COMPARED}",
    candidates=_by_partitions,
    measure=growth.measure,
    figures=build_figures("2 partitions", "64 partitions"),
)
BYTES = Case(
    name="growth-bytes",
    title="Small messages, and large ones",
    about=(
        "A Python handler gets messages of 1 kB and larger ones; their text compresses well. A batch has at most 1,000 "
        f"messages and 16 MiB. {_COMPARED}"
    ),
    candidates=_by_bytes,
    measure=growth.measure,
    figures=build_figures("1 kB", "larger", unit="1 MB"),
)
