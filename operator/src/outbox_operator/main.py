"""The composition root: election, then the controller, with Kopf as its informer, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import kopf

from outbox_operator import health, logs, metrics
from outbox_operator.controller import Controller
from outbox_operator.handlers import build_registry, build_settings
from outbox_operator.kube import Kube
from outbox_operator.leader import Leader
from outbox_operator.settings import read_settings

if TYPE_CHECKING:
    from outbox_operator.settings import Settings

log = logging.getLogger(__name__)

LOST_LEADERSHIP = 3


async def find_cluster_id(kube: Kube, settings: Settings) -> str:
    """Find this cluster's name in claims: as configured, else the uid of kube-system, which lives as long."""
    if settings.cluster_id:
        return settings.cluster_id
    namespace = await kube.get_namespace("kube-system")
    return str(namespace["metadata"]["uid"])


def end_on_sigterm() -> None:
    """End a standby at once: the first process of a container ignores signals without a handler. Kopf has its own."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)


async def run(settings: Settings) -> None:
    """Serve until a signal comes or the Lease is lost."""
    end_on_sigterm()
    async with Kube() as kube:
        controller: list[Controller] = []
        leader = Leader(kube, settings.lease_namespace, settings.lease_name, settings.identity)
        runner = await health.serve(
            settings.port,
            lambda: controller[0].stale_seconds if controller else 0.0,
            lambda: is_ready(leader, controller[0] if controller else None),
        )
        try:
            await leader.acquire()
            metrics.LEADER.set(1)
            controller.append(Controller(kube, settings, await find_cluster_id(kube, settings)))
            metrics.register(controller[0].store)
            await lead(controller[0], leader, settings)
        finally:
            if leader.active:
                await leader.release()
            await runner.cleanup()


def is_ready(leader: Leader, controller: Controller | None) -> bool:
    """Say whether this process can do its part: stand by, or, when it is the active one, list what it serves."""
    return leader.informed and (not leader.active or (controller is not None and controller.has_listed))


async def lead(controller: Controller, leader: Leader, settings: Settings) -> None:
    """Be the active process: the first part that ends, ends all."""
    informer = kopf.operator(
        registry=build_registry(controller),
        settings=build_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )
    election = asyncio.create_task(leader.keep(), name="election")
    work = asyncio.create_task(controller.run(), name="controller")
    watch = asyncio.create_task(informer, name="informer")
    done, pending = await asyncio.wait({election, work, watch}, return_when=asyncio.FIRST_COMPLETED)
    if election in done:
        # Another process may act from now on: not one more write, not even a graceful one.
        log.error("the Lease is lost; ending")
        os._exit(LOST_LEADERSHIP)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def main() -> None:
    """Run the operator."""
    settings = read_settings(sys.argv[1:], os.environ)
    logs.set_up(settings.log_level)
    try:
        asyncio.run(run(settings))
    except (KeyboardInterrupt, asyncio.CancelledError):
        log.info("ended")
