"""What a user can ask of a processor, as far as the data plane must know it: source, start, delivery, target.

The operator's `resources.py` embeds these models in the resource's spec and generates the CRD from them, so every
description here is what `kubectl explain` prints. Defaults live here and nowhere else.
"""

from __future__ import annotations

from outbox_core.spec.base import (
    Connection,
    Duration,
    Engine,
    ObjectName,
    ObjectRef,
    ProcessorId,
    SpecModel,
    SqlIdentifier,
    format_duration,
    parse_duration,
)
from outbox_core.spec.delivery import (
    CheckpointTime,
    Delivery,
    Guarantee,
    Mode,
    PartitionKey,
    Partitions,
    Retry,
    WhenExhausted,
)
from outbox_core.spec.rebuild import Rebuild
from outbox_core.spec.source import Columns, Cursor, SchemaManagement, Source, StartFrom, StartType, Table
from outbox_core.spec.spark import Application, SparkPlan, Trigger
from outbox_core.spec.target import TARGETS, LogTarget, ParquetTarget, PythonTarget, RabbitmqTarget, SqlTarget, Target

__all__ = [
    "TARGETS",
    "Application",
    "CheckpointTime",
    "Columns",
    "Connection",
    "Cursor",
    "Delivery",
    "Duration",
    "Engine",
    "Guarantee",
    "LogTarget",
    "Mode",
    "ObjectName",
    "ObjectRef",
    "ParquetTarget",
    "PartitionKey",
    "Partitions",
    "ProcessorId",
    "PythonTarget",
    "RabbitmqTarget",
    "Rebuild",
    "Retry",
    "SchemaManagement",
    "Source",
    "SparkPlan",
    "SpecModel",
    "SqlIdentifier",
    "SqlTarget",
    "StartFrom",
    "StartType",
    "Table",
    "Target",
    "Trigger",
    "WhenExhausted",
    "format_duration",
    "parse_duration",
]
