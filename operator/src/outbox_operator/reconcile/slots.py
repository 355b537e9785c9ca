"""Counts the processors whose pods an upgrade of the operator replaces now, so that only so many do at a time.

Who holds a slot is written on the workload, which the store has; memory only bridges the moment from the decision to
the API server's answer, and remembers whom to wake when a slot is free. Without it they look again by themselves.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from outbox_operator.api.observed import Slots
from outbox_operator.api.reasons import IN_FLIGHT, ConditionType
from outbox_operator.api.status import conditions_of
from outbox_operator.reconcile.observe import seconds_since

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox_operator.decision.rollout import Rollout
    from outbox_operator.settings import Budget
    from outbox_operator.watch.store import Store
    from outbox_operator.watch.workqueue import Key

SLOW: Final = 300.0
"""Seconds after which a replacement that is still in flight is told of: no word says that it will not end."""


@dataclass(slots=True)
class SlotKeeper:
    """The budget of one operator process over all resources that it serves; wakes those who wait for a slot."""

    _store: Store
    _budget: Budget
    _wake: Callable[[Key], None]
    _taking: set[Key] = field(default_factory=set, init=False)
    _waiting: dict[Key, None] = field(default_factory=dict, init=False)
    _stuck: str = field(default="", init=False)

    def look(self, key: Key) -> Slots:
        """Say what a resource may know; what is free is free only until the next await."""
        others = (self._store.slots | self._taking) - {key}
        limit = self._budget.of(self._store.processors)
        free = len(others) < limit
        return Slots(limit, free, "" if free else self._failing(others))

    def _failing(self, keys: set[Key]) -> str:
        """Name the first that does not become Ready again, and why in one word: its message may change all the time."""
        for key in sorted(keys):
            conditions = conditions_of(self._store.resource(key) or {})
            for kind in (ConditionType.READY, ConditionType.WORKERS_AVAILABLE):
                condition = conditions.get(kind)
                if condition is None or condition["status"] != "False":
                    continue
                if condition["reason"] not in IN_FLIGHT or seconds_since(condition["lastTransitionTime"]) > SLOW:
                    return f"{'/'.join(key)} is not Ready again ({condition['reason']})"
        return ""

    @contextmanager
    def kept(self, key: Key, rollout: Rollout) -> Iterator[None]:
        """Count a resource that takes a slot until the store has what was applied; then wake who has news."""
        if rollout.waits:
            self._waiting[key] = None
        else:
            self._waiting.pop(key, None)
        if rollout.slot:
            self._taking.add(key)
        try:
            yield
        finally:
            self._taking.discard(key)
        self.wake()

    def wake(self) -> None:
        """Wake as many of those who wait as there are free slots, and all when another one holds them up, or none."""
        if not self._waiting:
            return
        holding = self._store.slots | self._taking
        free = self._budget.of(self._store.processors) - len(holding)
        stuck = self._failing(holding) if free <= 0 else ""
        told, self._stuck = self._stuck, stuck
        for key in list(self._waiting)[: max(free, 0) if stuck == told else None]:
            del self._waiting[key]
            self._wake(key)
