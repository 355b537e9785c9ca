"""A file to which a peer's handler writes the number of each message that it was called for: ten digits and a newline.

The ledger reads it beside the peer's own table. It is written in pieces, so that it costs a handler next to nothing.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

WIDTH = 11
EVERY = 0.01


class NumbersFile:
    """Appends numbers; what was added is written every ten milliseconds."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._added: list[int] = []

    def add(self, number: int) -> None:
        """Keep one."""
        self._added.append(number)

    async def write_for_ever(self) -> None:
        """Write what was added, again and again."""
        while True:
            await asyncio.sleep(EVERY)
            if self._added:
                added, self._added = self._added, []
                with self._path.open("a") as file:
                    file.writelines(f"{number:010d}\n" for number in added)
