"""PURE: which part of a batch is tried next, so that the messages that fail are found and the others are handled.

Parts are tried in order. One that fails is halved until the message that fails is alone. A handler that begins messages
one by one tells more: the last one that it had begun is tried alone, and those before it are handled without it. Where
that once was not the one, the rest of the batch is searched by halves. How large a part is to begin with follows what
was found lately: a quarter after each message that fails, the double after two in a row that get through. So a lone
failing message costs a few parts, and of a thousand in a row nearly each is tried only once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from outbox_core.errors import OutboxError

_FIRST: Final = 16
"""The first part of a batch that failed as a whole is this part of it."""
_LESS: Final = 4
"""Smaller than the half: what is undone with a part that fails was done for nothing."""
_ENOUGH: Final = 2
"""Parts in a row that get through before larger ones are tried: where every other message fails, none ever are."""


@dataclass(frozen=True, slots=True)
class Search:
    """How far a batch was tried.

    Attributes:
        block: most messages that are tried at once.
        at: so many are behind: they were handled, or failed alone.
        failing_before: among the messages from `at` to before this one is one that fails; None: not known of any.
        failed_block: how large the part was in which that was found.
        row: so many parts of the full size got through since.
        last: the one that fails is probably the last before `failing_before`.
        trusted: what the handler had begun has told which one it was, so far.

    """

    count: int
    block: int
    at: int = 0
    failing_before: int | None = None
    failed_block: int = 0
    row: int = 0
    last: bool = False
    trusted: bool = True

    @property
    def is_over(self) -> bool:
        """All of the batch was tried."""
        return self.at >= self.count

    @property
    def next_block(self) -> int:
        """Most messages to try at once in the next batch, or in the rest of this one."""
        return self.block if self.failing_before is None else max(1, (self.failing_before - self.at) // 2)


@dataclass(frozen=True, slots=True)
class Found:
    """What was found by several parts that were tried with one call.

    Attributes:
        search: how far it is now.
        kept: so many parts got through.
        refused: the numbers of the messages that failed alone, from 0, each with its error, in order.

    """

    search: Search
    kept: int
    refused: tuple[tuple[int, OutboxError], ...]


def search_failed(count: int) -> Search:
    """Begin with a batch of which all was tried at once and failed.

    Not with its half: where one message in a hundred fails, halves of a large batch fail like the whole, and what was
    handled before the message that fails is undone with them. Simulated: a fifth fewer messages are handled twice.
    """
    return Search(count, max(1, count // _FIRST))


def decide_block(block: int, most: int, *, through: bool) -> int | None:
    """Say how many messages of the next batch, which has `most`, are tried at once after `block`; None: all of them.

    Where all messages of the last batch got `through` they are twice as many.
    """
    block = block * 2 if through else block
    return block if block < most else None


def decide_size(search: Search) -> int:
    """Say how many messages, from `at` on, are tried next: at least one."""
    if search.failing_before is None:
        return min(search.block, search.count - search.at)
    candidates = search.failing_before - search.at
    return max(1, candidates - 1 if search.last else candidates // 2)


def decide_after_part(search: Search, size: int) -> Search:
    """So many messages were handled."""
    at = search.at + size
    if search.failing_before is None:
        row = search.row + (size == search.block)
        return replace(search, at=at, row=row % _ENOUGH, block=search.block * 2 if row == _ENOUGH else search.block)
    if at < search.failing_before:
        return replace(search, at=at)  # what fails is in the rest
    return replace(search, at=at, failing_before=None, last=False, trusted=search.trusted and not search.last)


def decide_after_refusal(search: Search, size: int, begun: int | None = None) -> Search:
    """`size` messages failed together; one alone is behind then, as a message that fails.

    `begun` says how many of them the handler had begun, if that is known.
    """
    failed_block = size if search.failing_before is None else search.failed_block
    if size == 1:
        block = max(1, failed_block // _LESS)
        return replace(search, at=search.at + 1, failing_before=None, block=block, failed_block=0, row=0, last=False)
    trusted = search.trusted and not search.last
    last = trusted and begun is not None
    candidates = begun if last and begun else size
    return replace(
        search, failing_before=search.at + candidates, failed_block=failed_block, last=last, trusted=trusted
    )  # fmt: skip
