"""Handles a chunk of a consumer's batch although some of its messages fail: those leave it, the others are done.

All in one transaction, with the batch's completion where the resource asks for that, and in little time: what is left
is handled next. `postgres/transactions/savepoints.py` finds the messages that fail, and
`outbox_core.processor.competing` decides what becomes of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from outbox_core.processor import failing
from outbox_core.processor.claimed_batch import Chunk, Refusal, RefusalAction
from outbox_core.processor.competing import decide_refusal
from outbox_core.processor.isolation import Search
from outbox_core.processor.outcomes import Sifted
from outbox_worker.logs import get_logger
from outbox_worker.postgres.transactions.savepoints import MOST_KEPT, isolate, within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from outbox_core.errors import MessagesFailedError, OutboxError
    from outbox_core.message import Message
    from outbox_core.ports import GoOn
    from outbox_core.progress.checkpoint import Checkpoint
    from outbox_core.spec import Delivery
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.transactions.savepoints import Isolated

FRESH_SECONDS: Final = 0.5
"""So long one transaction goes on: other sessions do not see its effects before it is committed."""
AGAIN_SECONDS: Final = 0.2
"""The same for messages that failed before."""
_log = get_logger("outbox.worker")


def most_at_once(block: int) -> int:
    """Return how many messages are worth reading, where so many are handled at once."""
    return 2 * MOST_KEPT * block


@dataclass(slots=True)
class Sifting:
    """One chunk, sifted: made for it and used once.

    Attributes:
        messages: of the chunk, the first ones.
        failed_before: how often messages of it failed before.
        given_up: the place of a message that is not stopped at.

    """

    chunk: Chunk
    messages: tuple[Message, ...]
    failed_before: Mapping[Checkpoint, int]
    delivery: Delivery
    random: Random
    given_up: str | None
    _refusals: list[Refusal] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """So long one transaction goes on."""
        return AGAIN_SECONDS if self.chunk.is_retried else FRESH_SECONDS

    def run(self, connection: Connection, handle: Callable[[Chunk], object], block: int, find: GoOn | None) -> Sifted:
        """Handle what can be, in the connection's open transaction: at most `block` messages at once, to begin with.

        `handle` handles a part of the chunk; `find` goes on with a search with one call, None: parts are tried one by
        one.

        Raises:
            OutboxError: it was no message's fault; the caller rolls back.

        """
        in_time = within(self.seconds)

        def is_enough(found: Isolated) -> bool:
            self._judge(found)
            return self._stop is not None or in_time(found)

        found = isolate(
            connection, Search(len(self.messages), block), lambda begin, end: handle(self._part(begin, end)),
            lambda error: failing.is_refusal(error, self.delivery.retry), is_enough,
            None if find is None else lambda search, most: find(search, (), most),
        )  # fmt: skip
        self._judge(found)
        return self._sifted(found.at if self._stop is None else found.at - 1, found.next_block)

    def sort_named(self, error: MessagesFailedError) -> Sifted:
        """The target took all of the chunk but what it names: that leaves the batch, or is stopped at.

        What the target took behind a message that is stopped at, it is asked to take again.

        Raises:
            MessagesFailedError: it names what is no message's fault.

        """
        if not failing.are_refusals(error, self.delivery.retry):
            raise error
        for number, message in enumerate(self.messages):
            if message.checkpoint not in error.failed:
                continue
            self._refusals.append(self.refuse(number, error.failed[message.checkpoint]))
            if self._stop is not None:
                return self._sifted(number, self.delivery.batch_limit)
        return self._sifted(len(self.messages), self.delivery.batch_limit)

    def refuse(self, number: int, error: OutboxError) -> Refusal:
        """Decide about the message with this number in the chunk, from 0, which failed alone."""
        message = self.messages[number]
        crash_count = self.chunk.claimed.crash_count if number == 0 else 0
        attempts = crash_count + 1 + self.failed_before.get(message.checkpoint, 0)
        given_up = message.pair == self.given_up
        decision = decide_refusal(attempts, error, self.delivery, self.random.random(), given_up=given_up)
        return Refusal(message, error, decision)

    def _sifted(self, behind: int, block: int) -> Sifted:
        left = tuple(self._refusals if self._stop is None else self._refusals[:-1])
        upto: Checkpoint | None = self.messages[behind - 1].checkpoint if behind else None
        if behind == len(self.messages):
            upto = self.chunk.examined
        return Sifted(behind, upto, left, block, self._stop)

    @property
    def _stop(self) -> Refusal | None:
        last = self._refusals[-1] if self._refusals else None
        return last if last is not None and last.decision.action is RefusalAction.STOP else None

    def _judge(self, found: Isolated) -> None:
        """Decide about each message that failed since the last time."""
        for each in found.refused[len(self._refusals) :]:
            self._refusals.append(self.refuse(each.index, each.error))

    def _part(self, begin: int, end: int) -> Chunk:
        messages = self.messages[begin:end]
        after = self.messages[begin - 1].checkpoint if begin else self.chunk.claimed.after
        claimed = replace(self.chunk.claimed, after=after, upto=messages[-1].checkpoint, count=len(messages))
        if claimed.listed:
            # Only these: their pairs are sent with each statement.
            pairs = tuple(each.checkpoint for each in messages)
            claimed = replace(claimed, listed=tuple((pair, self.failed_before.get(pair, 0)) for pair in pairs))
        return replace(
            self.chunk, after=after, examined=messages[-1].checkpoint, messages=messages,
            examined_count=len(messages), matched_count=len(messages), claimed=claimed,
        )  # fmt: skip


def tell(sifted: Sifted) -> None:
    """Write to the log what left the batch: one line, however many they are."""
    if not sifted.refusals:
        return
    first = sifted.refusals[0]
    actions = sorted({each.decision.action.value for each in sifted.refusals})
    _log.warning(
        "messages left their batch",
        extra={"messages": len(sifted.refusals), "handled": sifted.handled, "actions": actions,
               "messageId": first.message.message_id, "attempts": first.decision.attempts, "error": str(first.error),
               "detail": first.error.detail},
    )  # fmt: skip
