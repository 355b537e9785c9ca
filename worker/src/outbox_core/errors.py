"""The domain's errors. Each says which `Reason` a person will read, and a message that tells what to do.

Business outcomes (a conflict code, a held lease) are values, not errors. Translation from a driver's exceptions happens
only in the adapters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.report import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_core.progress.checkpoint import Checkpoint


class OutboxError(Exception):
    """Something in an outbox processor went wrong."""

    reason: Reason = Reason.INTERNAL_ERROR

    def __init__(
        self,
        message: str,
        *,
        reason: Reason | None = None,
        detail: str | None = None,
        classes: tuple[str, ...] = (),
        retry_after: float | None = None,
    ) -> None:
        """Keep the message for people, the reason for machines, and a traceback (`detail`) for developers.

        `classes` are names by which `delivery.retry` may know it, the most telling first; `retry_after` are seconds
        that the target asks us to wait.
        """
        super().__init__(message)
        self.begun: int | None = None
        """So many messages of the batch the handler had begun, one by one, when it failed; None: not known."""
        self.detail = detail
        self.classes = classes
        self.retry_after = retry_after
        if reason is not None:
            self.reason = reason

    @property
    def error_class(self) -> str:
        """The most telling name: an exception's class, an SQLSTATE, else the reason."""
        return self.classes[0] if self.classes else self.reason.value


class TransientError(OutboxError):
    """May go away by itself: retry with backoff, the checkpoint stays where it is."""


class PermanentError(OutboxError):
    """Will not go away until a user changes something."""


class ConfigurationError(PermanentError):
    """What the user asked for cannot work as it is.

    Checked again at intervals, because what has to change may be elsewhere.
    """

    reason = Reason.INVALID_CONFIGURATION


class HandlerError(OutboxError):
    """The handler or the statement rejected the batch; counts as an attempt."""

    reason = Reason.HANDLER_FAILED


class MessagesFailedError(HandlerError):
    """Some messages of a batch failed, and the target knows which; it took every other message of the batch.

    Raised only for a batch of several messages: one that fails alone is reported with its own error.
    """

    def __init__(self, failed: Mapping[Checkpoint, HandlerError]) -> None:
        """Keep the error of each message that failed, by its place in the outbox: at least one, in batch order."""
        place, first = next(iter(failed.items()))
        others = "" if len(failed) == 1 else f" (and {len(failed) - 1} more of the batch)"
        super().__init__(
            f"the message at {place} failed{others}: {first}",
            reason=first.reason,
            detail=first.detail,
            classes=first.classes,
            retry_after=first.retry_after,
        )
        self.failed = failed


def drop_traceback(error: OutboxError) -> OutboxError:
    """Drop the places that an error and its causes came through; what they say stays.

    Those places hold the batch, and one of them mostly holds the error: memory that is free only when Python looks for
    cycles of objects.
    """
    found: BaseException | None = error
    seen: set[int] = set()
    while found is not None and id(found) not in seen:  # two can name each other
        seen.add(id(found))
        found.__traceback__ = None
        found = found.__cause__ or found.__context__
    return error
