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
from outbox_core.state import initial_state
from outbox_worker.access import read_access
from outbox_worker.competing import (
    CompetingHeartbeat,
    CompetingObserver,
    build_consumer,
    build_lane,
    hand_back,
    lease_as_asked,
)
from outbox_worker.databases import open_databases
from outbox_worker.gate import Gate, HeldWatch
from outbox_worker.health import HealthServer
from outbox_worker.index_builder import IndexBuilder
from outbox_worker.lane import Lane
from outbox_worker.logs import get_logger, set_up_logging
from outbox_worker.loop import Loop
from outbox_worker.membership import Membership
from outbox_worker.observer import Observer, PartitionedObserver
from outbox_worker.one_shot import run_once
from outbox_worker.ownership import Heartbeat, Ownership, PartitionedHeartbeat
from outbox_worker.parting import give_back
from outbox_worker.partition_steps import PartitionSteps, Shared
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.reading import divided_into
from outbox_worker.rebuilding import PartitionRebuildSteps, RebuildSteps
from outbox_worker.settings import Act, Settings, read_config, read_settings
from outbox_worker.shutdown import Shutdown, Wakeup
from outbox_worker.sinks import build_target
from outbox_worker.source_watch import SourceWatch
from outbox_worker.speaker import Speaker
from outbox_worker.status import Identity, Progress, StatusBoard, write_last_word, write_termination
from outbox_worker.steps import Steps
from outbox_worker.telemetry import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Target
    from outbox_worker.databases import Databases
    from outbox_worker.session import Session

_log = get_logger("outbox.worker")


@dataclass(slots=True)
class WorkerParts:
    """Everything a worker is made of."""

    config: ProcessorConfig
    key: ProcessorKey
    pod: str
    token: UUID
    databases: Databases
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


@dataclass(frozen=True, slots=True)
class Process:
    """What lasts as long as the process, whatever the number of partitions."""

    settings: Settings
    config: ProcessorConfig
    name: str
    engine: Engine
    token: UUID
    wakeup: Wakeup
    progress: Progress
    shutdown: Shutdown
    board: StatusBoard
    telemetry: Telemetry


def main(arguments: Sequence[str] | None = None, engine: Engine | None = None) -> int:
    """Run a worker; return the exit code. Another engine brings its own target and steps."""
    settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    set_up_logging(settings.log_level)
    # A ConfigMap's file can be replaced within the same second: a cached .pyc would hide it.
    sys.dont_write_bytecode = True
    try:
        config = read_config(settings)
        name = f"outbox {config.processor_id} {settings.pod}"
        if settings.act is not Act.RUN:
            return run_once(settings, config, open_databases(config, settings.connections, name))
        return _run(settings, config, name, engine or Engine(build_target, choose_steps(config)))
    except ConfigurationError as err:
        _log.error("configuration", extra={"error": str(err)})
        write_last_word(str(err), settings.termination_log)
        return ExitCode.INVALID_CONFIGURATION


def _run(settings: Settings, config: ProcessorConfig, name: str, engine: Engine) -> int:
    config = lease_as_asked(config)
    wakeup, progress = Wakeup(), Progress()
    identity = Identity(settings.pod, settings.pod_uid, str(uuid.uuid4()))
    board = StatusBoard(config, identity, initial_state(time.monotonic()))
    telemetry = Telemetry(board)
    process = Process(
        settings, config, name, engine, uuid.UUID(identity.instance), wakeup, progress,
        Shutdown(wakeup, settings.grace_seconds), board, telemetry,
    )  # fmt: skip
    health = HealthServer(
        (settings.host, settings.port),
        access=read_access(settings),
        overdue=progress.overdue,
        is_ready=lambda: board.is_ready,
        report=board.report,
        metrics=telemetry.render,
        set_intent=board.set_intent,
    )
    health.start()
    _log.info(
        "started", extra={"processor": config.processor_id, "resource": str(config.resource), "port": health.port}
    )
    count = None if config.delivery.partitions is None else config.delivery.partitions.count
    take_over = settings.take_over
    try:
        if config.delivery.competing is not None:
            _compete(process, take_over=take_over)
            return ExitCode.DONE
        while (found := _work(process, count, take_over=take_over)) is not None:
            _log.info("the processor is divided otherwise", extra={"partitions": found, "before": count})
            count, take_over = found, False
            board.redivide(count, initial_state(time.monotonic()))
    finally:
        health.close()
    _log.info("ended")
    return ExitCode.DONE


def _work(process: Process, count: int | None, *, take_over: bool) -> int | None:
    """Work until the process shall end; or until there are as many partitions as is returned."""
    config, membership = process.config, None
    if config.delivery.partitions is not None and count is not None:
        membership = Membership(count, process.token, asked=config.delivery.partitions.count)
        config = divided_into(config, count)
    crew, target = _build_crew(process, config, membership)
    watching = open_databases(config, process.settings.connections, f"{process.name} heartbeat")
    heartbeat = _build_heartbeat(crew, process, watching.home, membership)
    beside: list[SourceWatch | IndexBuilder] = []
    if watching.apart:
        beside.append(SourceWatch(crew[0].observer, watching.reading))
    if config.delivery.partitions is not None:
        building = open_databases(config, process.settings.connections, f"{process.name} index").reading
        beside.append(
            IndexBuilder(crew[0].observer, process.board, building, config.source, config.delivery.partitions.key)
        )
    heartbeat.start()
    for thread in beside:
        thread.start()
    chance = random.SystemRandom()
    outdated = False
    try:
        all_steps = _make_steps(crew, process, membership, take_over=take_over)
        lanes = [
            Lane(
                each, steps, initial_state(time.monotonic()), telemetry=process.telemetry, chance=chance,
                membership=membership,
            )
            for each, steps in zip(crew, all_steps, strict=True)
        ]  # fmt: skip
        Loop(lanes, wakeup=process.wakeup, progress=process.progress).run()
        outdated = any(lane.is_obsolete for lane in lanes) and not process.shutdown.requested
    finally:
        heartbeat.stop()
        for thread in beside:
            thread.stop()
        if not outdated:
            give_back(crew)
            write_termination(process.board.report(), process.settings.termination_log)
        target.close()
        crew[0].databases.discard()
    return membership.found if membership is not None and outdated else None


def _compete(process: Process, *, take_over: bool) -> None:
    """Work as one of several consumers until the process shall end."""
    if process.config.rebuild_of is not None:
        raise ConfigurationError(
            "rebuildOf needs delivery.mode Ordered or Partitioned: batches have no place to compare"
        )
    (parts,), target = _build_crew(process, process.config, None)
    consumer = build_consumer(parts, process.settings.pod_uid)
    watching = open_databases(process.config, process.settings.connections, f"{process.name} heartbeat")
    wiring = _heartbeat_wiring([parts], process, watching.home)
    heartbeat = CompetingHeartbeat(built=consumer, token=parts.token, **wiring)
    heartbeat.start()
    try:
        lane = build_lane(
            parts, consumer, take_over=take_over, telemetry=process.telemetry, chance=random.SystemRandom()
        )
        Loop([lane], wakeup=process.wakeup, progress=process.progress).run()
    finally:
        heartbeat.stop()
        hand_back(parts, consumer)
        give_back([parts])
        write_termination(process.board.report(), process.settings.termination_log)
        target.close()
        parts.databases.discard()


def _build_crew(
    process: Process, config: ProcessorConfig, membership: Membership | None
) -> tuple[list[WorkerParts], Target]:
    key = ProcessorKey(config.source.schema_name, config.processor_id)
    seconds = config.delivery.lease_duration.total_seconds()
    observer = _build_observer(key, process.board, config, membership)
    target, transactional = process.engine.build_target(config, process.settings)
    parts = WorkerParts(
        config, key, process.settings.pod, process.token,
        open_databases(config, process.settings.connections, process.name), Ownership(seconds), observer, process.board,
        process.shutdown, target, transactional, Gate(config.delivery), observer.watch,
    )  # fmt: skip
    process.board.set_circuit(lambda: parts.gate.phase.value)
    if membership is None:
        return [parts], target
    return [
        replace(parts, key=replace(key, partition=partition), ownership=Ownership(seconds))
        for partition in range(membership.count)
    ], target


def _build_observer(
    key: ProcessorKey, board: StatusBoard, config: ProcessorConfig, membership: Membership | None
) -> Observer:
    seconds = config.delivery.lease_duration.total_seconds()
    if config.delivery.competing is not None:
        return CompetingObserver(key, board, lease=seconds, config=config)
    if membership is None:
        return Observer(key, board, lease=seconds, apart=config.is_apart)
    return PartitionedObserver(key, board, lease=seconds, membership=membership, config=config)


def _heartbeat_wiring(crew: Sequence[WorkerParts], process: Process, session: Session) -> dict[str, Any]:
    parts = crew[0]
    return {
        "session": session,
        "key": parts.key,
        "resource": parts.config.resource,
        "lease": parts.config.delivery.lease_duration,
        "ownerships": [each.ownership for each in crew],
        "observer": parts.observer,
        "progress": process.progress,
        "speaker": Speaker(parts.board, claim_uid=parts.config.resource.uid, pod=parts.pod, token=parts.token),
        "on_loss": process.wakeup.wake,
    }


def _build_heartbeat(
    crew: Sequence[WorkerParts], process: Process, session: Session, membership: Membership | None
) -> Heartbeat:
    wiring = _heartbeat_wiring(crew, process, session)
    if membership is None:
        return Heartbeat(**wiring)
    return PartitionedHeartbeat(membership=membership, pod=crew[0].pod, **wiring)


def _make_steps(
    crew: Sequence[WorkerParts], process: Process, membership: Membership | None, *, take_over: bool
) -> list[Steps]:
    """Make the steps of each partition; the first of them takes the claim over, if that is asked."""
    if membership is None:
        return [process.engine.make_steps(crew[0], take_over=take_over)]
    shared, rest = Shared(), crew
    first: list[Steps] = []
    if crew[0].config.rebuild_of is not None:
        first = [PartitionRebuildSteps(crew[0], take_over=take_over, shared=shared, membership=membership, crew=crew)]
        rest = crew[1:]
    return first + [
        PartitionSteps(parts, take_over=take_over and parts is crew[0], shared=shared, membership=membership)
        for parts in rest
    ]


def choose_steps(config: ProcessorConfig) -> Callable[..., Steps]:
    """Choose how the steps of a processor that is not divided are done."""
    return Steps if config.rebuild_of is None else RebuildSteps
