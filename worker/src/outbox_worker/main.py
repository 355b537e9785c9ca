"""Command line and composition root: the one module of the worker that knows every part."""

from __future__ import annotations

import os
import random
import sys
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outbox_core.errors import ConfigurationError
from outbox_core.report import ExitCode
from outbox_core.spec import Guarantee
from outbox_core.state import initial_state
from outbox_worker.gate import Gate, HeldWatch
from outbox_worker.health import HealthServer
from outbox_worker.lane import Lane
from outbox_worker.logs import get_logger, set_up_logging
from outbox_worker.loop import Loop
from outbox_worker.membership import Membership
from outbox_worker.observer import Observer, PartitionedObserver
from outbox_worker.one_shot import run_once
from outbox_worker.ownership import Heartbeat, Ownership, PartitionedHeartbeat
from outbox_worker.parting import give_back
from outbox_worker.partition_steps import Outage, PartitionSteps
from outbox_worker.postgres import holding
from outbox_worker.postgres.connection import ConnectionFiles
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.reading import reader_of
from outbox_worker.session import Session
from outbox_worker.settings import Act, Settings, read_config, read_settings
from outbox_worker.shutdown import Shutdown, Wakeup
from outbox_worker.status import Identity, Progress, StatusBoard, write_last_word, write_termination
from outbox_worker.steps import Steps
from outbox_worker.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from psycopg import sql

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch
    from outbox_core.ports import Target
    from outbox_worker.postgres.messages import MessageReader

_log = get_logger("outbox.worker")


@dataclass(slots=True)
class WorkerParts:
    """Everything a worker is made of."""

    config: ProcessorConfig
    key: ProcessorKey
    pod: str
    token: UUID
    session: Session
    ownership: Ownership
    observer: Observer
    board: StatusBoard
    shutdown: Shutdown
    target: Target
    transactional_target: bool
    gate: Gate
    watch: HeldWatch


@dataclass(frozen=True, slots=True)
class Engine:
    """What tells one engine from another: where messages go, and how the steps are done."""

    build_target: Callable[[ProcessorConfig, Settings], tuple[Target, bool]]
    make_steps: Callable[..., Steps]


def main(arguments: Sequence[str] | None = None, engine: Engine | None = None) -> int:
    """Run a worker; return the exit code. Another engine brings its own target and steps."""
    settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    set_up_logging(settings.log_level)
    # A ConfigMap's file can be replaced within the same second: a cached .pyc would hide it.
    sys.dont_write_bytecode = True
    try:
        config = read_config(settings)
        files = ConnectionFiles(settings.connections / "source")
        name = f"outbox {config.processor_id} {settings.pod}"
        if settings.act is not Act.RUN:
            return run_once(settings, config, Session(files, name))
        return _run(settings, config, files, name, engine or Engine(build_target, Steps))
    except ConfigurationError as err:
        _log.error("configuration", extra={"error": str(err)})
        write_last_word(str(err), settings.termination_log)
        return ExitCode.INVALID_CONFIGURATION


def _run(settings: Settings, config: ProcessorConfig, files: ConnectionFiles, name: str, engine: Engine) -> int:
    token = uuid.uuid4()
    wakeup, progress = Wakeup(), Progress()
    shutdown = Shutdown(wakeup, settings.grace_seconds)
    board = StatusBoard(config, Identity(settings.pod, settings.pod_uid, str(token)), initial_state(time.monotonic()))
    telemetry = Telemetry(board)
    key = ProcessorKey(config.source.schema_name, config.processor_id)
    seconds = config.delivery.lease_duration.total_seconds()
    divided = config.delivery.partitions
    membership = None if divided is None else Membership(divided.count, token)
    observer = (
        Observer(key, board, lease=seconds)
        if membership is None
        else PartitionedObserver(key, board, lease=seconds, membership=membership, config=config)
    )
    target, transactional = engine.build_target(config, settings)
    parts = WorkerParts(
        config, key, settings.pod, token, Session(files, name), Ownership(seconds), observer, board, shutdown, target,
        transactional, Gate(config.delivery), observer.watch,
    )  # fmt: skip
    board.set_circuit(lambda: parts.gate.phase.value)
    crew = [parts] if membership is None else [
        replace(parts, key=replace(key, partition=partition), ownership=Ownership(seconds))
        for partition in range(membership.count)
    ]  # fmt: skip
    health = HealthServer(
        settings.port,
        overdue=progress.overdue,
        is_ready=lambda: board.is_ready,
        report=board.report,
        metrics=telemetry.render,
        set_intent=board.set_intent,
    )
    heartbeat = _build_heartbeat(crew, Session(files, f"{name} heartbeat"), progress, wakeup, membership)
    health.start()
    heartbeat.start()
    _log.info(
        "started", extra={"processor": config.processor_id, "resource": str(config.resource), "port": health.port}
    )
    try:
        all_steps = _make_steps(crew, engine, take_over=settings.take_over)
        chance = random.SystemRandom()
        lanes = [
            Lane(
                each, steps, initial_state(time.monotonic()), telemetry=telemetry, chance=chance, membership=membership
            )
            for each, steps in zip(crew, all_steps, strict=True)
        ]
        Loop(lanes, wakeup=wakeup, progress=progress).run()
    finally:
        heartbeat.stop()
        give_back(crew)
        write_termination(board.report(), settings.termination_log)
        target.close()
        parts.session.discard()
        health.close()
    _log.info("ended")
    return ExitCode.DONE


def _build_heartbeat(
    crew: Sequence[WorkerParts], session: Session, progress: Progress, wakeup: Wakeup, membership: Membership | None
) -> Heartbeat:
    parts = crew[0]
    wiring: dict[str, Any] = {
        "session": session,
        "key": parts.key,
        "resource": parts.config.resource,
        "lease": parts.config.delivery.lease_duration,
        "ownerships": [each.ownership for each in crew],
        "observer": parts.observer,
        "progress": progress,
        "on_loss": wakeup.wake,
    }
    if membership is None:
        return Heartbeat(**wiring)
    return PartitionedHeartbeat(membership=membership, pod=parts.pod, **wiring)


def _make_steps(crew: Sequence[WorkerParts], engine: Engine, *, take_over: bool) -> list[Steps]:
    """Make the steps of each partition; the first of them takes the claim over, if that is asked."""
    if crew[0].config.delivery.partitions is None:
        return [engine.make_steps(crew[0], take_over=take_over)]
    outage = Outage()
    return [PartitionSteps(parts, take_over=take_over and parts is crew[0], outage=outage) for parts in crew]


def build_target(config: ProcessorConfig, settings: Settings) -> tuple[Target, bool]:
    """Build the target that the resource names, and say whether its effects happen in the database's transaction.

    Imports are late: a worker carries only its own target.

    Raises:
        ConfigurationError: no target of the worker's is named, or it cannot give the guarantee asked for.

    """
    target = config.target
    if target is not None and target.sql is not None:
        from outbox_worker.sinks.sql import SqlSink

        return SqlSink(target.sql, _relation(config)), True
    if target is not None and target.python is not None:
        from outbox_worker.sinks.python import PythonSink

        return PythonSink(target.python, settings.handler), True
    if config.guarantee is Guarantee.TRANSACTIONAL:
        raise ConfigurationError(
            "delivery.guarantee Transactional needs a target in the source's database: sql or python"
        )
    if target is not None and target.rabbitmq is not None:
        from outbox_worker.sinks.rabbitmq import RabbitmqSink

        sink = RabbitmqSink(
            target.rabbitmq,
            settings.connections / "target",
            timeout=config.delivery.timeout.total_seconds(),
            processor_id=config.processor_id,
            pod=settings.pod,
        )
        return sink, False
    if target is not None and target.log is not None:
        from outbox_worker.sinks.log import LogSink

        return LogSink(target.log), False
    raise ConfigurationError("target names none of sql, python, rabbitmq, log: the worker has no other")


def _relation(config: ProcessorConfig) -> Callable[[Batch], sql.Composed]:
    readers: dict[int, MessageReader] = {}

    def relation(batch: Batch) -> sql.Composed:
        if batch.held:
            key = ProcessorKey(config.source.schema_name, config.processor_id, batch.partition)
            return holding.held_relation(key, batch.held)
        if batch.partition not in readers:
            readers[batch.partition] = reader_of(config, batch.partition)
        rows = readers[batch.partition].batch_relation(batch.after, batch.examined)
        return holding.without_aside(rows, batch.aside) if batch.aside else rows

    return relation
