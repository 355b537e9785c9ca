"""PURE: what the workers of a case are told: their file, as the operator would write it, and their target's code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tests.tools.chaos.cases import LEASE_SECONDS, Ending, Target

if TYPE_CHECKING:
    from tests.tools.chaos.cases import Case


def build_config(case: Case, *, partitions: int | None = None, generation: int = 1) -> dict[str, Any]:
    """Write the file for the case's resource, with another number of partitions where one is named."""
    delivery: dict[str, Any] = {
        "pollInterval": "100ms",
        "batchSize": 50,
        "retry": {"initialBackoff": "50ms", "maxBackoff": "500ms"},
    } | case.delivery
    if "competing" not in delivery:
        delivery["leaseDuration"] = f"{LEASE_SECONDS:g}s"
    if partitions is not None and "partitions" in delivery:
        delivery["partitions"] = delivery["partitions"] | {"count": partitions}
    return {
        "resource": {"cluster": "chaos", "namespace": "chaos", "name": case.name, "uid": f"uid-{case.name}"},
        "generation": generation,
        "processorId": case.name,
        "source": {"connection": {"secretRef": {"name": "db"}}} | case.source,
        "delivery": delivery,
        "target": _build_target(case),
    }


def _build_target(case: Case) -> dict[str, Any]:
    apart = {"connection": {"secretRef": {"name": "reporting"}}} if case.apart else {}
    match case.target:
        case Target.SQL:
            return {"sql": {"statement": build_statement(case)} | apart}
        case Target.PYTHON:
            return {"python": {"module": "orders", "function": "handle", "configMapRef": {"name": "handlers"}} | apart}
        case Target.RABBITMQ:
            connection = {"secretRef": {"name": "broker"}}
            return {"rabbitmq": {"connection": connection, "exchange": case.name, "routingKey": "{partitionKey}"}}
        case Target.STREAM:
            return {"rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": case.name}}
        case Target.KAFKA:
            return {"kafka": {"connection": {"secretRef": {"name": "kafka"}}, "topic": case.name}}


_EFFECT: Final = """
INSERT INTO chaos.{table} (message_id, order_key, order_sequence, cents, partition, epoch, holder)
SELECT {columns}, chaos.partition_of(partition_key, division.count), lease.epoch, lease.pod
  FROM {rows}
 CROSS JOIN (SELECT coalesce(max(partition_count), 1) AS count FROM outbox.processor_partitions
              WHERE processor_id = '{name}') AS division
  LEFT JOIN outbox.processor_leases lease
    ON lease.processor_id = '{name}' AND lease.partition = chaos.partition_of(partition_key, division.count)
 ORDER BY {order}
"""
"""An effect names who held its partition when it was made, as the database had it, beside who made it (the table's
default): the ledger needs no word of the worker's for that."""


def build_statement(case: Case) -> str:
    """Return the statement of the target `sql`."""
    return _EFFECT.format(
        table=case.table,
        name=case.name,
        columns="message_id, data->>'orderKey', (data->>'sequence')::int, (data->>'cents')::int",
        rows="batch",
        order="batch.position" if case.ending is Ending.SNAPSHOT_RANGE else "batch.transaction_id, batch.position",
    )


def build_handler(case: Case) -> str:
    """Return the module of the target `python`."""
    statement = _EFFECT.format(
        table=case.table,
        name=case.name,
        columns="id, partition_key, sequence, cents",
        rows="unnest(%s::text[], %s::text[], %s::int[], %s::int[]) WITH ORDINALITY "
        "AS m(id, partition_key, sequence, cents, n)",
        order="n",
    )
    return f'''
STATEMENT = """{statement}"""
{_FAILS if case.failing else ""}

def handle(batch, connection):
    rows = [(m.message_id, d["orderKey"], d["sequence"], d["cents"]) for m in batch for d in [m.json()]]
    {"fail_some(rows)" if case.failing else ""}
    connection.execute(STATEMENT, [list(column) for column in zip(*rows)])
'''


_FAILS: Final = """
import time
import zlib

FIRST_SEEN = {}


def fail_some(rows):
    for message_id, *_ in rows:
        if zlib.crc32(message_id.encode()) % 16 == 0:
            if time.monotonic() < FIRST_SEEN.setdefault(message_id, time.monotonic()) + 0.7:
                raise ValueError("this one fails for a while")

"""
"""One message of sixteen fails, until each process that tries it has known it for so long."""
