"""Command line and composition root: the one module of the worker that knows every part."""

from __future__ import annotations

import os
import sys
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_core.errors import ConfigurationError
from outbox_core.processor import initial_state
from outbox_core.report import ExitCode
from outbox_core.spec import Guarantee
from outbox_worker.health import HealthServer
from outbox_worker.logs import get_logger, set_up_logging
from outbox_worker.loop import Loop
from outbox_worker.observer import Observer
from outbox_worker.one_shot import run_once
from outbox_worker.ownership import Heartbeat, Ownership
from outbox_worker.parting import give_back
from outbox_worker.postgres.connection import ConnectionFiles
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.messages import MessageReader
from outbox_worker.session import Session
from outbox_worker.settings import Act, Settings, read_config, read_settings
from outbox_worker.shutdown import Shutdown, Wakeup
from outbox_worker.status import Identity, Progress, StatusBoard, write_last_word, write_termination
from outbox_worker.steps import Steps
from outbox_worker.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Target

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
    state = initial_state(time.monotonic())
    board = StatusBoard(config, Identity(settings.pod, settings.pod_uid, str(token)), state)
    telemetry = Telemetry(board)
    key = ProcessorKey(config.source.schema_name, config.processor_id)
    lease = config.delivery.lease_duration
    ownership = Ownership(lease.total_seconds())
    observer = Observer(key, board, lease=lease.total_seconds())
    target, transactional = engine.build_target(config, settings)
    session = Session(files, name)
    parts = WorkerParts(
        config, key, settings.pod, token, session, ownership, observer, board, shutdown, target, transactional
    )
    health = HealthServer(
        settings.port,
        overdue=progress.overdue,
        is_ready=lambda: board.is_ready,
        report=board.report,
        metrics=telemetry.render,
        set_intent=board.set_intent,
    )
    heartbeat = Heartbeat(
        session=Session(files, f"{name} heartbeat"),
        key=key,
        resource=config.resource,
        lease=lease,
        ownership=ownership,
        observer=observer,
        progress=progress,
        on_loss=wakeup.wake,
    )
    health.start()
    heartbeat.start()
    _log.info(
        "started", extra={"processor": config.processor_id, "resource": str(config.resource), "port": health.port}
    )
    try:
        steps = engine.make_steps(parts, take_over=settings.take_over)
        Loop(parts, steps, wakeup=wakeup, progress=progress, telemetry=telemetry).run(state)
    finally:
        heartbeat.stop()
        give_back(parts)
        write_termination(board.report(), settings.termination_log)
        target.close()
        parts.session.discard()
        health.close()
    _log.info("ended")
    return ExitCode.DONE


def build_target(config: ProcessorConfig, settings: Settings) -> tuple[Target, bool]:
    """Build the target that the resource names, and say whether its effects happen in the database's transaction.

    Imports are late: a worker carries only its own target.

    Raises:
        ConfigurationError: no target of the worker's is named, or it cannot give the guarantee asked for.

    """
    target = config.target
    if target is not None and target.sql is not None:
        from outbox_worker.sinks.sql import SqlSink

        return SqlSink(target.sql, MessageReader(config.source).batch_relation), True
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
