"""What a user can ask of a processor, as far as the data plane must know it: source, start, delivery, target.

The operator's `resources.py` embeds these models in the resource's spec and generates the CRD from them, so every
description here is what `kubectl explain` prints. Defaults live here and nowhere else.
"""

from __future__ import annotations

from outbox_core.spec.base import (
    Connection,
    Engine,
    ObjectName,
    ObjectRef,
    ProcessorId,
    SpecModel,
    format_duration,
    read_other_version,
)
from outbox_core.spec.delivery import (
    Blocks,
    CheckpointTime,
    CircuitBreaker,
    Competing,
    Delivery,
    Guarantee,
    Mode,
    PartitionKey,
    Partitions,
    RateLimit,
    Retry,
    WhenExhausted,
)
from outbox_core.spec.source import (
    DEFAULT_CURSOR,
    Columns,
    Cursor,
    SchemaManagement,
    Source,
    StartFrom,
    StartType,
    Table,
)
from outbox_core.spec.spark import SparkPlan
from outbox_core.spec.target import (
    TARGETS,
    LogTarget,
    PythonTarget,
    RabbitmqStreamTarget,
    RabbitmqTarget,
    Rebuild,
    SqlTarget,
    Target,
    TargetKind,
)
