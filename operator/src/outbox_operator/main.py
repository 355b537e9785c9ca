"""The composition root: election, then the controller, with Kopf's watches, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from dataclasses import replace

import kopf

from outbox_operator import health, logs, metrics
from outbox_operator.cluster.election import Election, Leader
from outbox_operator.cluster.key_secrets import obtain_keys
from outbox_operator.cluster.kube import Kube
from outbox_operator.handlers import build_registry, build_settings
from outbox_operator.reconcile.controller import Controller
from outbox_operator.settings import Settings, read_settings

log = logging.getLogger(__name__)


async def find_cluster_id(kube: Kube, settings: Settings) -> str:
    """Find this cluster's name in claims: as configured, else the uid of kube-system, which lives as long."""
    if settings.cluster_id:
        return settings.cluster_id
    namespace = await kube.call("GET", "api/v1/namespaces/kube-system")
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
        controller: Controller | None = None
        election = Election(settings.lease_namespace, settings.lease_name, settings.identity)
        runner = await health.serve(
            settings.port,
            lambda: controller.stale_seconds if controller is not None else 0.0,
            lambda: find_fault(election.leader, controller),
        )
        try:
            await election.acquire()
            metrics.LEADER.set(1)
            keyed = replace(settings, images=replace(settings.images, keys=await obtain_keys(kube, settings)))
            controller = Controller(kube, keyed, await find_cluster_id(kube, settings))
            metrics.register(controller.store)
            await lead(controller, settings)
        finally:
            await election.end()
            await runner.cleanup()


def find_fault(leader: Leader, controller: Controller | None) -> str:
    """Say why this process cannot do its part, which is to stand by, or to list what it serves; empty when it can."""
    if not leader.informed:
        return "the Lease cannot be read yet: who is active is not known"
    if not leader.active:
        return ""
    return controller.fault if controller is not None else "starting"


async def lead(controller: Controller, settings: Settings) -> None:
    """Be the active process: the first part that ends, ends all."""
    parts = [asyncio.create_task(part) for part in (controller.run(), watch(controller, settings))]
    try:
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Also when this process is told to end: the Lease is given up next, and another process may act then.
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)
    for part in done:
        part.result()


async def watch(controller: Controller, settings: Settings) -> None:
    """Let Kopf watch once everything was listed: it ends where it may not list, and could not say so in /readyz."""
    await controller.listed()
    await kopf.operator(
        registry=build_registry(controller),
        settings=build_settings(),
        standalone=True,
        clusterwide=not settings.namespaces,
        namespaces=settings.namespaces,
    )


def main() -> None:
    """Run the operator."""
    settings = read_settings(sys.argv[1:], os.environ)
    logs.set_up(settings.log_level)
    try:
        asyncio.run(run(settings))
    except (KeyboardInterrupt, asyncio.CancelledError):
        log.info("ended")
