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
from outbox_core.processor.state import Step, initial_state
from outbox_core.report import ExitCode, WorkerState
from outbox_worker.competing.consumer import lease_as_asked
from outbox_worker.databases import SharedDatabases, open_databases
from outbox_worker.engine.loop import Loop, ProcessorRunners
from outbox_worker.engine.runner import Runner
from outbox_worker.engine.steps import StepContext
from outbox_worker.engine.throttle import Throttle
from outbox_worker.feeds.partition_reader import partitioned_into
from outbox_worker.index_builder import IndexBuilder
from outbox_worker.logs import get_logger, set_up_logging
from outbox_worker.observe.health import HealthServer, read_access
from outbox_worker.observe.observer import Observer, SourceWatch
from outbox_worker.observe.status import Identity, ProcessStatus, Progress, write_last_word, write_termination
from outbox_worker.observe.status_writer import StatusWriter
from outbox_worker.ownership.heartbeat import Beat, Heartbeat, Holding, Ownership
from outbox_worker.ownership.one_shot import run_once
from outbox_worker.ownership.release import give_back
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.settings import Act, Settings, read_config, read_processors, read_settings
from outbox_worker.shutdown import Shutdown, Waker
from outbox_worker.targets import build_target
from outbox_worker.wiring import MODES, Replica, build_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Target
    from outbox_worker.background import BackgroundThread
    from outbox_worker.databases import Databases
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
class Processor:
    """One of the processors of this process: its files, its configuration, and what is said of it."""

    settings: Settings
    config: ProcessorConfig
    status: ProcessStatus


@dataclass(frozen=True, slots=True)
class Process:
    """What lasts as long as the process, while the number of partitions may change.

    Attributes:
        name: of its sessions in the database.

    """

    settings: Settings
    processors: list[Processor]
    name: str
    engine: Engine
    token: UUID
    waker: Waker
    progress: Progress
    shutdown: Shutdown


@dataclass(frozen=True, slots=True)
class Work:
    """The parts of one processor, partitioned as it is now."""

    holding: Holding
    replica: Replica
    runners: list[Runner]


def main(arguments: Sequence[str] | None = None, engine: Engine | None = None) -> int:
    """Run a worker; return the exit code. Another engine brings its own target and steps."""
    settings = read_settings(sys.argv[1:] if arguments is None else arguments, os.environ)
    set_up_logging(settings.log_level)
    # A ConfigMap's file can be replaced within the same second: a cached .pyc would hide it.
    sys.dont_write_bytecode = True
    try:
        if settings.act is not Act.RUN:
            config = read_config(settings)
            name = f"outbox {config.processor_id} {settings.pod}"
            return run_once(settings, config, open_databases(config, settings, name))
        return _run(settings, engine or Engine(build_target))
    except ConfigurationError as err:
        _log.error("configuration", extra={"error": str(err)})
        write_last_word(str(err), settings.termination_log)
        return ExitCode.INVALID_CONFIGURATION


def _run(settings: Settings, engine: Engine) -> int:
    waker, progress = Waker(), Progress()
    identity = Identity(settings.pod, settings.pod_uid, str(uuid.uuid4()))
    is_shared, processors = settings.processors is not None, []
    for place, read in read_processors(settings):
        config = lease_as_asked(read)
        status = ProcessStatus(config, identity, initial_state(time.monotonic()), is_shared=is_shared)
        processors.append(Processor(place, config, status))
    statuses, config = [each.status for each in processors], processors[0].config
    name = f"outbox {settings.pod}" if is_shared else f"outbox {config.processor_id} {settings.pod}"
    process = Process(
        settings, processors, name, engine, uuid.UUID(identity.instance), waker, progress,
        Shutdown(waker, settings.grace_seconds),
    )  # fmt: skip
    health = HealthServer(
        (settings.host, settings.port), access=read_access(settings), statuses=statuses, progress=progress
    )
    health.start()
    for each in processors:
        _log.info(
            "started",
            extra={"processor": each.config.processor_id, "resource": str(each.config.resource), "port": health.port},
        )
    count = None if config.delivery.partitions is None else config.delivery.partitions.count
    take_over = settings.take_over
    _spare_collector()
    try:
        while (found := _work(process, count, take_over=take_over)) is not None:
            _log.info("goes on with the new number of partitions", extra={"partitions": found, "before": count})
            count, take_over = found, False
            statuses[0].rebalance(count, initial_state(time.monotonic()))
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
    """Work until the process shall end; or until its processor has as many partitions as is returned."""
    works = _build_works(process, count, take_over=take_over)
    threads = _build_threads(process, works)
    for thread in threads:
        thread.start()
    runners = [runner for work in works for runner in work.runners]
    outdated = False
    try:
        Loop([ProcessorRunners(work.runners) for work in works], waker=process.waker, progress=process.progress).run()
        outdated = any(runner.is_obsolete for runner in runners) and not process.shutdown.requested
    finally:
        for thread in threads:
            thread.stop()
        if not outdated:
            give_back(process.shutdown, [work.holding for work in works])
        if not outdated and process.settings.processors is None:
            write_termination(process.processors[0].status.report(), process.settings.termination_log)
        for work in works:
            work.holding.contexts[0].target.close()
            work.holding.contexts[0].databases.discard()
    return works[0].replica.membership.found if outdated else None


def _build_works(process: Process, count: int | None, *, take_over: bool) -> list[Work]:
    """Build the parts of each processor; of several, one that cannot be built leaves the others alone.

    Raises:
        ConfigurationError: none can be built.

    """
    if process.settings.processors is None:
        (processor,) = process.processors
        config = processor.config if count is None else partitioned_into(processor.config, count)
        databases = open_databases(config, processor.settings, process.name)
        return [_build_work(process, processor, databases, take_over=take_over)]
    works, faults, shared = list[Work](), list[str](), SharedDatabases(process.processors[0].settings, process.name)
    for processor in process.processors:
        try:
            databases = shared.of(processor.config, processor.settings)
            works.append(_build_work(process, processor, databases, take_over=take_over))
        except ConfigurationError as err:
            _tell_invalid(processor.status, err)
            faults.append(f"{processor.config.resource.name}: {err}")
    if not works:
        raise ConfigurationError(f"no processor of {process.settings.processors} can be run: {'; '.join(faults)}")
    return works


def _tell_invalid(status: ProcessStatus, error: ConfigurationError) -> None:
    state = initial_state(time.monotonic())
    ended = state._replace(step=Step.END, state=WorkerState.STOPPED, reason=error.reason, message=str(error))
    status.watch(0, lambda: ended)
    _log.error("configuration", extra=status.names | {"error": str(error)})


def _build_work(process: Process, processor: Processor, databases: Databases, *, take_over: bool) -> Work:
    """Build the parts of one processor, partitioned as the configuration of its sessions says."""
    config, settings, status = databases.config, processor.settings, processor.status
    asked, partitions = processor.config.delivery.partitions, config.delivery.partitions
    replica = Replica(
        config, ProcessorKey(config.source.schema_name, config.processor_id), settings.pod, settings.pod_uid,
        process.token, None if asked is None else asked.count,
    )  # fmt: skip
    units = _build_units(process, processor, databases, replica)
    renewal = MODES[config.delivery.mode].renewal(replica, [each.ownership for each in units])
    status_writer = StatusWriter(status, claim_uid=config.resource.uid, pod=settings.pod, token=process.token)
    chance = random.SystemRandom()
    runners = [
        Runner(
            each, steps, initial_state(time.monotonic()), chance=chance,
            membership=None if partitions is None else replica.membership,
        )
        for each, steps in zip(
            units, build_steps(units, replica, take_over=take_over, feed=process.engine.feed), strict=True
        )
    ]  # fmt: skip
    return Work(Holding(units, renewal, status_writer), replica, runners)


def _build_units(
    process: Process, processor: Processor, databases: Databases, replica: Replica
) -> list[StepContext]:  # fmt: skip
    """Build what the steps of each unit use; all units share target and connections."""
    config, key, status = replica.config, replica.key, processor.status
    seconds = config.delivery.lease_duration.total_seconds()
    sight = MODES[config.delivery.mode].sight(replica, status)
    # One heartbeat renews all leases of the process: a look around may take a part of the shortest one.
    shortest = min(each.config.delivery.lease_duration for each in process.processors).total_seconds()
    observer = Observer(key, status, sight, lease=shortest, remote_target=config.has_remote_target)
    throttle = Throttle(config.delivery)
    status.circuit = lambda: throttle.phase.value
    context = StepContext(
        config,
        key,
        processor.settings.pod,
        process.token,
        databases,
        Ownership(seconds),
        observer,
        status,
        process.shutdown,
        process.engine.build_target(config, processor.settings),
        throttle,
    )
    if config.delivery.partitions is None:
        return [context]
    return [
        replace(context, key=replace(key, partition=partition), ownership=Ownership(seconds))
        for partition in range(config.delivery.partitions.count)
    ]


def _build_threads(process: Process, works: list[Work]) -> list[BackgroundThread]:
    """Build what works beside the loop: one heartbeat for all; what else there is only one processor alone needs."""
    first, settings = works[0].holding.contexts[0], process.processors[0].settings

    def open_for(purpose: str) -> Databases:
        return open_databases(first.config, settings, f"{process.name} {purpose}")

    watching = open_for("heartbeat")
    beats = [Beat(work.holding, process.waker.wake) for work in works]
    threads: list[BackgroundThread] = [Heartbeat(watching.target, beats, process.progress)]
    if first.config.has_remote_target:
        threads.append(SourceWatch(first.observer, watching.source))
    if first.config.delivery.partitions is not None:
        by, source = first.config.delivery.partitions.key, open_for("index").source
        threads.append(IndexBuilder(first.observer, first.status, source, first.config.source, by))
    return threads
