"""What a partition of a divided processor does otherwise than a whole one."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from outbox_core import happening as h
from outbox_core.errors import ConfigurationError, OutboxError
from outbox_core.report import Reason
from outbox_core.state import Step
from outbox_worker.postgres import checkpoints, ownership, partitions
from outbox_worker.postgres.slots import ensure_slot_index
from outbox_worker.steps import Steps, lease_of

if TYPE_CHECKING:
    import psycopg

    from outbox_core.spec import PartitionKey, Partitions
    from outbox_core.state import ProcessorState
    from outbox_worker.steps import Parts

_ECHO: Final = 0.5
"""Seconds for which the failure to prepare of one partition is every partition's: they share the connection."""


@dataclass(slots=True)
class Outage:
    """The last failure to prepare, shared by the partitions of a process."""

    error: OutboxError | None = None
    until: float = 0.0


class PartitionSteps(Steps):
    """The steps of one partition."""

    def __init__(self, parts: Parts, *, take_over: bool, outage: Outage) -> None:
        """Keep the parts, and the failures shared with the process's other partitions."""
        super().__init__(parts, take_over=take_over)
        self._outage = outage
        self._actions[Step.RELEASE] = self._release
        divided = parts.config.delivery.partitions
        if divided is None:
            raise ConfigurationError("delivery.mode Partitioned needs delivery.partitions")
        self._divided: Partitions = divided

    @override
    def _prepare(self, state: ProcessorState) -> h.Happening:
        if self._outage.error is not None and time.monotonic() < self._outage.until:
            raise self._outage.error
        try:
            prepared = super()._prepare(state)
            if self._parts.key.partition == 0:
                self._parts.board.set_advice(
                    ensure_slot_index(self._connection(), self._parts.config.source, self._divided.key)
                )
        except OutboxError as err:
            self._outage.error, self._outage.until = err, time.monotonic() + _ECHO
            raise
        self._outage.error = None
        return prepared

    @override
    def _ensure_start(self, connection: psycopg.Connection[Any], lease: h.HeldLease) -> checkpoints.Start | None:
        """Load the partition's checkpoint; the first of all partitions writes down where they all start."""
        config, key = self._parts.config, self._parts.key
        count, by = self._divided.count, describe_key(self._divided.key)
        stored = checkpoints.load(connection, key)
        # Computed once for all partitions: one that is first owned later must not start later.
        start = checkpoints.start_pair(connection, config.source, config.start_from) if stored is None else None
        answer = partitions.begin(
            connection, key, count=count, by=by, start=start, epoch=lease.epoch, token=lease.token
        )
        if not answer.owned:
            return None
        if (answer.count, answer.by) != (count, by):
            there = f"{answer.count} partitions by {answer.by}" if answer.count else "not divided"
            raise ConfigurationError(
                f"processor {key.processor_id!r} is {there} here, and {count} partitions by {by} are asked for: the "
                "same keys would go to other checkpoints. Ask for what is there, or use another processorId",
                reason=Reason.PARTITIONS_DIFFER,
            )
        if stored is None:
            stored = checkpoints.load(connection, key)
        if stored is None:
            raise ConfigurationError(
                f"partition {key.partition} of processor {key.processor_id!r} has lost its checkpoint row: somebody "
                "deleted it. Put it back with `outbox rewind`, or by hand, then the partition goes on",
                reason=Reason.CHECKPOINT_OLDER,
            )
        return checkpoints.Start(stored.pair, start_from_used=answer.begun)

    def _release(self, state: ProcessorState) -> h.Happening:
        lease = lease_of(state)
        ownership.release_lease(self._connection(), self._parts.key, epoch=lease.epoch, token=lease.token)
        self._parts.ownership.drop_lease()
        return h.Released()


def describe_key(key: PartitionKey) -> str:
    """Write a partition key down, so that the database can tell one from another."""
    if key.data is not None:
        return f"data {json.dumps(key.data)}"
    if key.metadata is not None:
        return f"metadata {json.dumps(key.metadata)}"
    return f"column {key.column}" if key.column is not None else "partition key"
