"""Registers with Kopf, the one source of watch events: it watches and delivers; it never patches a resource.

Only `on.event`: other handlers write annotations or finalizers on users' resources, or run on a diff that a restart
loses. Kopf discovers nothing but the kinds named here, and watches other kinds filtered by our label. It begins with a
list of its own, of whole objects: they are slimmed at once, and what is known already is no news (`store.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kopf
from typing_extensions import override

from outbox_operator.api.naming import RESOURCES, SELECTOR
from outbox_operator.api.resources import KIND
from outbox_operator.cluster.kube import PAGE
from outbox_operator.watch.store import WATCHED_KINDS, slim

if TYPE_CHECKING:
    from outbox_operator.reconcile.controller import Controller


def build_registry(controller: Controller) -> kopf.OperatorRegistry:
    """Register the informers."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(kopf.login_via_client)

    async def seen(*, type: str, body: kopf.Body, param: Any = None, **_: Any) -> None:  # noqa: A002 - Kopf's name
        controller.seen(slim({**body, "kind": param}), deleted=type == "DELETED")

    for kind in WATCHED_KINDS:
        kopf.on.event(*RESOURCES[kind], registry=registry, id=f"seen-{kind}", param=kind)(seen)
    return registry


class NothingToCompare(kopf.DiffBaseStorage):
    """Keeps no last state: Kopf would copy each object to compare it, for handlers that are not here."""

    @override
    def build(self, **_: Any) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    @override
    def fetch(self, **_: Any) -> None:
        """There is none."""

    @override
    def store(self, **_: Any) -> None:
        """There is nothing to keep."""


def build_settings() -> kopf.OperatorSettings:
    """Set Kopf up: no peering, no scanning, no posting, watches that notice their own silence, little memory."""
    settings = kopf.OperatorSettings()
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = 70
    settings.watching.chunk_size = PAGE
    # Kopf gives each object that an event is about a task of its own, for at least so long. Zero would end it unheard.
    settings.queueing.idle_timeout = 0.1
    settings.persistence.diffbase_storage = NothingToCompare()
    settings.networking.request_timeout = 30
    settings.process.ultimate_exiting_timeout = 20
    for kind in WATCHED_KINDS:
        if kind != KIND:
            settings.watching.label_selectors[RESOURCES[kind]] = SELECTOR
    return settings
