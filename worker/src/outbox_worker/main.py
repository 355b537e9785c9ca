"""Command line and composition root: the one module of the worker that knows every part."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError
from outbox_core.processor.state import initial_state
from outbox_core.report import ExitCode
from outbox_worker.competing.consumer import lease_as_asked
from outbox_worker.databases import open_databases
from outbox_worker.engine.loop import Loop
from outbox_worker.engine.runner import Runner
from outbox_worker.engine.steps import StepContext
from outbox_worker.engine.throttle import Throttle
from outbox_worker.feeds.partition_reader import partitioned_into
from outbox_worker.index_builder import IndexBuilder
from outbox_worker.logs import get_logger, set_up_logging
from outbox_worker.observe.access import read_access
from outbox_worker.observe.health import HealthServer
from outbox_worker.observe.observer import Observer
from outbox_worker.observe.source_watch import SourceWatch
from outbox_worker.observe.speaker import Speaker
from outbox_worker.observe.status import Identity, ProcessStatus, Progress, write_last_word, write_termination
from outbox_worker.ownership.heartbeat import Heartbeat, Ownership
from outbox_worker.ownership.one_shot import run_once
from outbox_worker.ownership.release import give_back
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.settings import Act, Settings, read_config, read_settings
from outbox_worker.shutdown import Shutdown, Waker
from outbox_worker.targets import build_target
from outbox_worker.wiring import MODES, Replica, build_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Target
    from outbox_worker.wiring import BuildFeed

_COLLECT_AFTER: Final = 5_000
"""Objects that may be part of a cycle, made and not freed, after which Python looks for cycles: about 0.5 MB."""
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
    process = Process(
        settings, config, name, engine, uuid.UUID(identity.instance), waker, progress,
        Shutdown(waker, settings.grace_seconds), status,
    )  # fmt: skip
    health = HealthServer(
        (settings.host, settings.port),
        access=read_access(settings),
        status=status,
        progress=progress,
    )
    health.start()
    _log.info(
        "started", extra={"processor": config.processor_id, "resource": str(config.resource), "port": health.port}
    )
    count = None if config.delivery.partitions is None else config.delivery.partitions.count
    take_over = settings.take_over
    _spare_collector()
    try:
        while (found := _work(process, count, take_over=take_over)) is not None:
            _log.info("goes on with the new number of partitions", extra={"partitions": found, "before": count})
            count, take_over = found, False
            status.rebalance(count, initial_state(time.monotonic()))
    finally:
        health.close()
    _log.info("ended")
    return ExitCode.DONE


def _spare_collector() -> None:
    """Let Python look for cycles of objects less often.

    A batch is tens of thousands of tuples that no cycle holds. By default Python looks through those after each 700 new
    ones, and ever again through all modules: up to 15 % of the time of a backlog.
    """
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def _work(process: Process, count: int | None, *, take_over: bool) -> int | None:
    """Work until the process shall end; or until there are as many partitions as is returned."""
    config = process.config if count is None else partitioned_into(process.config, count)
    mode, replica = MODES[config.delivery.mode], _build_replica(process, config)
    membership = None if count is None else replica.membership
    units = _build_units(process, replica, count)
    first = units[0]
    ownerships = [each.ownership for each in units]
    renewal = mode.renewal(replica, ownerships)
    speaker = Speaker(process.status, claim_uid=config.resource.uid, pod=first.pod, token=first.token)
    watching = open_databases(config, process.settings.connections, f"{process.name} heartbeat")
    threads: list[Heartbeat | SourceWatch | IndexBuilder] = [
        Heartbeat(
            session=watching.target, key=first.key, resource=config.resource, lease=config.delivery.lease_duration,
            ownerships=ownerships, renewal=renewal, observer=first.observer, progress=process.progress,
            speaker=speaker, on_loss=process.waker.wake,
        )
    ]  # fmt: skip
    if watching.has_remote_target:
        threads.append(SourceWatch(first.observer, watching.source))
    if config.delivery.partitions is not None:
        building = open_databases(config, process.settings.connections, f"{process.name} index").source
        by = config.delivery.partitions.key
        threads.append(IndexBuilder(first.observer, process.status, building, config.source, by))
    for thread in threads:
        thread.start()
    chance = random.SystemRandom()
    outdated = False
    try:
        runners = [
            Runner(each, steps, initial_state(time.monotonic()), chance=chance, membership=membership)
            for each, steps in zip(
                units, build_steps(units, replica, take_over=take_over, feed=process.engine.feed), strict=True
            )
        ]  # fmt: skip
        Loop(runners, waker=process.waker, progress=process.progress).run()
        outdated = any(runner.is_obsolete for runner in runners) and not process.shutdown.requested
    finally:
        for thread in threads:
            thread.stop()
        if not outdated:
            give_back(units, renewal, speaker)
            write_termination(process.status.report(), process.settings.termination_log)
        first.target.close()
        first.databases.discard()
    return membership.found if membership is not None and outdated else None


def _build_replica(process: Process, config: ProcessorConfig) -> Replica:
    asked, settings = process.config.delivery.partitions, process.settings
    return Replica(
        config, ProcessorKey(config.source.schema_name, config.processor_id), pod=settings.pod,
        pod_uid=settings.pod_uid, token=process.token, asked=None if asked is None else asked.count,
    )  # fmt: skip


def _build_units(process: Process, replica: Replica, count: int | None) -> list[StepContext]:
    """Build what the steps of each unit use; all units share target and connections."""
    config, key = replica.config, replica.key
    seconds = config.delivery.lease_duration.total_seconds()
    sight = MODES[config.delivery.mode].sight(replica, process.status)
    observer = Observer(key, process.status, sight, lease=seconds, remote_target=config.has_remote_target)
    throttle = Throttle(config.delivery)
    process.status.circuit = lambda: throttle.phase.value
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
        process.engine.build_target(config, process.settings),
        throttle,
    )
    if count is None:
        return [context]
    return [
        replace(context, key=replace(key, partition=partition), ownership=Ownership(seconds))
        for partition in range(count)
    ]
