"""Target `python`: a user's function, called once for each batch as function(batch, connection)."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

import psycopg
from typing_extensions import override

from outbox_core.errors import HandlerError, OutboxError, TransientError
from outbox_core.ports import InTransaction
from outbox_core.report import Reason
from outbox_worker.handlers.handler import HandlerModule, asked_wait, class_names, describe, summary
from outbox_worker.postgres.errors import translate
from outbox_worker.postgres.transactions.guard import GuardedConnection, HandlerEndedTransactionError
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.spec import PythonTarget
    from outbox_worker.postgres.transactions.transaction import Transaction
    from outbox_worker.settings import Settings


_HANDLERS_OWN = frozenset({"25006", "25P02", "57014"})
"""Of the errors with which another try may succeed.

Writing where only the handler can have forbidden it, going on after an error, and a statement that ran into the
timeout.
"""


class _Counted(tuple["Message", ...]):  # noqa: SLOT001 - a tuple has no room for them
    """Messages that know how many of them a handler's loop has begun; None once a loop has ended."""

    begun: int | None = None

    @override
    def __iter__(self) -> Iterator[Message]:
        for number, message in enumerate(super().__iter__(), 1):
            self.begun = number
            yield message
        self.begun = None


class PythonSink(InTransaction):
    """Calls the function; what it does wrong is reported with its own traceback."""

    needs_payload = True

    def __init__(self, target: PythonTarget, directory: Path) -> None:
        self._directory = directory
        self._module = HandlerModule(target, directory)

    @override
    def check(self) -> None:
        self._module.function()

    @override
    def changed(self) -> bool:
        return self._module.changed()

    @override
    def handle(self, transaction: Transaction, batch: Batch) -> int:
        function = self._module.function()
        guarded = GuardedConnection(transaction.connection, transaction.mark)
        messages = _Counted(batch.messages)
        process = os.getpid()
        try:
            try:
                function(replace(batch, messages=messages), guarded)
            finally:
                if os.getpid() != process:
                    _end_child(sys.exc_info()[1])
            guarded.check_after()
        except Interrupted as err:
            raise err.as_error(self._module.name, detail=describe(err, self._directory)) from err
        except HandlerEndedTransactionError as err:
            err.detail = describe(err, self._directory, err.frames)
            raise
        except BaseException as err:  # sys.exit(), a cancelled task: they end a batch, not the worker
            explained = self._explain(err, guarded)
            explained.begun = messages.begun
            raise explained from err
        return len(batch)

    def _explain(self, err: BaseException, guarded: GuardedConnection) -> OutboxError:
        try:
            guarded.check_violation()
        except HandlerEndedTransactionError as violation:
            violation.detail = describe(violation, self._directory, violation.frames)
            return violation
        if isinstance(err, OutboxError):
            return err
        reason = Reason.HANDLER_FAILED
        if isinstance(err, psycopg.Error):
            translated = translate(err)
            if isinstance(translated, TransientError) and err.sqlstate not in _HANDLERS_OWN:
                return translated
            if err.sqlstate == "57014":
                reason = Reason.HANDLER_TIMEOUT
        frames = list(traceback.extract_tb(err.__traceback__))
        return HandlerError(
            f"{self._module.name} failed: {summary(err, self._directory, frames)}",
            reason=reason,
            detail=describe(err, self._directory, frames),
            classes=class_names(err),
            retry_after=asked_wait(err),
        )


def _end_child(error: BaseException | None) -> NoReturn:
    """End a process that the function forked, with the exit code that Python gives it.

    It has the connections of this one: as the worker that it is a copy of, it would speak on them beside its parent.
    """
    code = error.code if isinstance(error, SystemExit) else error and 1
    os._exit(code if isinstance(code, int) else int(code is not None))


def build(target: PythonTarget, config: ProcessorConfig, settings: Settings) -> PythonSink:
    """Build the target."""
    del config
    return PythonSink(target, settings.handler)
