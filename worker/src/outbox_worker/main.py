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
from outbox_core.processor.state import initial_state
from outbox_core.report import ExitCode
from outbox_worker.competing.consumer import (
    CompetingHeartbeat,
    CompetingObserver,
    build_consumer,
    build_runner,
    hand_back,
    lease_as_asked,
)
from outbox_worker.databases import open_databases
from outbox_worker.engine.loop import Loop
from outbox_worker.engine.partition_runner import PartitionRunner
from outbox_worker.engine.steps import StepContext
from outbox_worker.engine.throttle import Throttle
from outbox_worker.feeds.partition_reader import partitioned_into
from outbox_worker.index_builder import IndexBuilder
from outbox_worker.logs import get_logger, set_up_logging
from outbox_worker.observe.access import read_access
from outbox_worker.observe.health import HealthServer
from outbox_worker.observe.observer import Observer, PartitionedObserver
from outbox_worker.observe.source_watch import SourceWatch
from outbox_worker.observe.speaker import Speaker
from outbox_worker.observe.status import Identity, ProcessStatus, Progress, write_last_word, write_termination
from outbox_worker.observe.telemetry import Telemetry
from outbox_worker.ownership.heartbeat import Heartbeat, Ownership, PartitionedHeartbeat
from outbox_worker.ownership.membership import Membership
from outbox_worker.ownership.one_shot import run_once
from outbox_worker.ownership.release import give_back
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.settings import Act, Settings, read_config, read_settings
from outbox_worker.shutdown import Shutdown, Waker
from outbox_worker.targets import build_target
from outbox_worker.wiring import build_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Target
    from outbox_worker.session import Session
    from outbox_worker.wiring import BuildFeed

_log = get_logger("outbox.worker")


@dataclass(frozen=True, slots=True)
class Engine:
    """What tells one engine from another: where messages go, and what prepares batches; None: the mode's own feed."""

    build_target: Callable[[ProcessorConfig, Settings], Target]
    feed: BuildFeed | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """What lasts as long as the process, while the number of partitions may change."""

    settings: Settings
    config: ProcessorConfig
    name: str
    engine: Engine
    token: UUID
    waker: Waker
    progress: Progress
    shutdown: Shutdown
    status: ProcessStatus
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
        return _run(settings, config, name, engine or Engine(build_target))
    except ConfigurationError as err:
        _log.error("configuration", extra={"error": str(err)})
        write_last_word(str(err), settings.termination_log)
        return ExitCode.INVALID_CONFIGURATION


def _run(settings: Settings, config: ProcessorConfig, name: str, engine: Engine) -> int:
    config = lease_as_asked(config)
    waker, progress = Waker(), Progress()
    identity = Identity(settings.pod, settings.pod_uid, str(uuid.uuid4()))
    status = ProcessStatus(config, identity, initial_state(time.monotonic()))
    telemetry = Telemetry(status)
    process = Process(
        settings, config, name, engine, uuid.UUID(identity.instance), waker, progress,
        Shutdown(waker, settings.grace_seconds), status, telemetry,
    )  # fmt: skip
    health = HealthServer(
        (settings.host, settings.port),
        access=read_access(settings),
        overdue=progress.overdue,
        is_ready=lambda: status.is_ready,
        report=status.report,
        metrics=telemetry.render,
        set_intent=status.set_intent,
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
            _log.info("goes on with the new number of partitions", extra={"partitions": found, "before": count})
            count, take_over = found, False
            status.rebalance(count, initial_state(time.monotonic()))
    finally:
        health.close()
    _log.info("ended")
    return ExitCode.DONE


def _work(process: Process, count: int | None, *, take_over: bool) -> int | None:
    """Work until the process shall end; or until there are as many partitions as is returned."""
    config, membership = process.config, None
    if config.delivery.partitions is not None and count is not None:
        membership = Membership(count, process.token, asked=config.delivery.partitions.count)
        config = partitioned_into(config, count)
    partitions, target = _build_partitions(process, config, membership)
    watching = open_databases(config, process.settings.connections, f"{process.name} heartbeat")
    heartbeat = _build_heartbeat(partitions, process, watching.target, membership)
    beside: list[SourceWatch | IndexBuilder] = []
    if watching.has_remote_target:
        beside.append(SourceWatch(partitions[0].observer, watching.source))
    if config.delivery.partitions is not None:
        building = open_databases(config, process.settings.connections, f"{process.name} index").source
        beside.append(
            IndexBuilder(
                partitions[0].observer, process.status, building, config.source, config.delivery.partitions.key
            )
        )
    heartbeat.start()
    for thread in beside:
        thread.start()
    chance = random.SystemRandom()
    outdated = False
    try:
        all_steps = build_steps(partitions, membership, take_over=take_over, feed=process.engine.feed)
        runners = [
            PartitionRunner(
                each, steps, initial_state(time.monotonic()), telemetry=process.telemetry, chance=chance,
                membership=membership,
            )
            for each, steps in zip(partitions, all_steps, strict=True)
        ]  # fmt: skip
        Loop(runners, waker=process.waker, progress=process.progress).run()
        outdated = any(runner.is_obsolete for runner in runners) and not process.shutdown.requested
    finally:
        heartbeat.stop()
        for thread in beside:
            thread.stop()
        if not outdated:
            give_back(partitions)
            write_termination(process.status.report(), process.settings.termination_log)
        target.close()
        partitions[0].databases.discard()
    return membership.found if membership is not None and outdated else None


def _compete(process: Process, *, take_over: bool) -> None:
    """Work as one of several consumers until the process shall end."""
    if process.config.rebuild_of is not None:
        raise ConfigurationError(
            "rebuildOf needs delivery.mode Ordered or Partitioned: batches have no place to compare"
        )
    (context,), target = _build_partitions(process, process.config, None)
    consumer = build_consumer(context, process.settings.pod_uid)
    watching = open_databases(process.config, process.settings.connections, f"{process.name} heartbeat")
    wiring = _heartbeat_wiring([context], process, watching.target)
    heartbeat = CompetingHeartbeat(built=consumer, token=context.token, **wiring)
    heartbeat.start()
    try:
        runner = build_runner(
            context, consumer, take_over=take_over, telemetry=process.telemetry, chance=random.SystemRandom()
        )
        Loop([runner], waker=process.waker, progress=process.progress).run()
    finally:
        heartbeat.stop()
        hand_back(context, consumer)
        give_back([context])
        write_termination(process.status.report(), process.settings.termination_log)
        target.close()
        context.databases.discard()


def _build_partitions(
    process: Process, config: ProcessorConfig, membership: Membership | None
) -> tuple[list[StepContext], Target]:
    key = ProcessorKey(config.source.schema_name, config.processor_id)
    seconds = config.delivery.lease_duration.total_seconds()
    observer = _build_observer(key, process.status, config, membership)
    target = process.engine.build_target(config, process.settings)
    context = StepContext(
        config,
        key,
        process.settings.pod,
        process.token,
        open_databases(config, process.settings.connections, process.name),
        Ownership(seconds),
        observer,
        process.status,
        process.shutdown,
        target,
        Throttle(config.delivery),
        observer.watch,
    )
    process.status.set_circuit(lambda: context.throttle.phase.value)
    if membership is None:
        return [context], target
    return [
        replace(context, key=replace(key, partition=partition), ownership=Ownership(seconds))
        for partition in range(membership.count)
    ], target


def _build_observer(
    key: ProcessorKey, status: ProcessStatus, config: ProcessorConfig, membership: Membership | None
) -> Observer:
    seconds = config.delivery.lease_duration.total_seconds()
    if config.delivery.competing is not None:
        return CompetingObserver(key, status, lease=seconds, config=config)
    if membership is None:
        return Observer(key, status, lease=seconds, remote_target=config.has_remote_target)
    return PartitionedObserver(key, status, lease=seconds, membership=membership, config=config)


def _heartbeat_wiring(partitions: Sequence[StepContext], process: Process, session: Session) -> dict[str, Any]:
    context = partitions[0]
    return {
        "session": session,
        "key": context.key,
        "resource": context.config.resource,
        "lease": context.config.delivery.lease_duration,
        "ownerships": [each.ownership for each in partitions],
        "observer": context.observer,
        "progress": process.progress,
        "speaker": Speaker(context.status, claim_uid=context.config.resource.uid, pod=context.pod, token=context.token),
        "on_loss": process.waker.wake,
    }


def _build_heartbeat(
    partitions: Sequence[StepContext], process: Process, session: Session, membership: Membership | None
) -> Heartbeat:
    wiring = _heartbeat_wiring(partitions, process, session)
    if membership is None:
        return Heartbeat(**wiring)
    return PartitionedHeartbeat(membership=membership, pod=partitions[0].pod, **wiring)
