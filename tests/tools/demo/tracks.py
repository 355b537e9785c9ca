"""Scenes that go on at once: one thread for each processor, so that no scene disturbs another's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from tests.tools.demo.waiting import DemoError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.tools.demo.producing.shop import Shop


class Tracks:
    """Named lists of scenes; each list is played in order, all lists at once."""

    def __init__(self, tracks: Mapping[str, Sequence[Callable[[], object]]]) -> None:
        """Start all tracks."""
        self.failures: list[tuple[str, BaseException]] = []
        self._threads = [
            threading.Thread(target=self._play, args=(name, scenes), name=name, daemon=True)
            for name, scenes in tracks.items()
        ]
        for thread in self._threads:
            thread.start()

    def _play(self, name: str, scenes: Sequence[Callable[[], object]]) -> None:
        try:
            for scene in scenes:
                if self.failures:
                    return
                scene()
        except BaseException as error:  # noqa: BLE001  # raised again by `join`, in the main thread
            self.failures.append((name, error))

    def join(self, shop: Shop) -> None:
        """Wait for all tracks; stop waiting at the first failure.

        Raises:
            DemoError: a scene failed, or the producers did.

        """
        for thread in self._threads:
            while thread.is_alive() and not self.failures:
                thread.join(0.5)
                shop.check()
        if self.failures:
            name, error = self.failures[0]
            raise DemoError(f"track {name}: {error}") from error
