"""What Kopf is told to watch, and what it delivers of it."""

from __future__ import annotations

from typing import Any, cast

import kopf

from outbox_operator.api.naming import RESOURCES, SELECTOR
from outbox_operator.api.resources import KIND
from outbox_operator.handlers import build_registry, build_settings
from outbox_operator.watch.store import WATCHED_KINDS


class Seen:
    """Takes what is delivered."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, bool]] = []

    def seen(self, body: dict[str, Any], *, deleted: bool) -> None:
        self.told.append((body["kind"], body["metadata"]["name"], deleted))


async def test_each_kind_is_delivered_by_its_name_and_a_deletion_as_one():
    seen = Seen()
    handlers = list(build_registry(cast("Any", seen))._watching.get_all_handlers())
    assert len({handler.id for handler in handlers}) == len(handlers) == len(WATCHED_KINDS)
    for handler in handlers:
        for event in ("ADDED", "DELETED"):
            body = kopf.Body({"metadata": {"name": event.lower(), "namespace": "shop"}})
            await cast("Any", handler.fn)(type=event, body=body, param=handler.param, logger=None)
    assert seen.told == [
        (kind, name, deleted) for kind in WATCHED_KINDS for name, deleted in (("added", False), ("deleted", True))
    ]


def test_other_kinds_than_resources_are_watched_by_their_label():
    selectors = build_settings().watching.label_selectors
    assert set(selectors.values()) == {SELECTOR}
    plurals = {RESOURCES[kind][2] for kind in WATCHED_KINDS if kind != KIND}
    assert {cast("Any", selector).any_name for selector in selectors} == plurals
