"""Run one step: an error in it becomes the outcome `Failed`, in every mode."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeVar

from outbox_core.errors import OutboxError
from outbox_core.processor import outcomes
from outbox_core.report import Reason
from outbox_worker.logs import get_logger
from outbox_worker.postgres.errors import DatabaseError, translate
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_worker.engine.steps import StepContext

AnyOutcome = TypeVar("AnyOutcome")
_log = get_logger("outbox.worker")


def run_step(
    context: StepContext, act: Callable[[], AnyOutcome], names: Mapping[str, object]
) -> AnyOutcome | outcomes.Failed:
    """Do the step; `names` go with what is logged.

    A wait in it, for a locked table or a server that is gone, ends with the grace period.
    """
    try:
        return context.shutdown.limited(inf, act)
    except OutboxError as err:
        error = err
    except DatabaseError as err:
        error = translate(err)
    except Interrupted as err:
        context.databases.discard()  # it may be in the middle of a statement
        error = err.as_error("the step")
    except Exception as err:  # noqa: BLE001 - reported in status and tried again, like any other fault
        _log.exception("a fault of the worker itself", extra=dict(names))
        context.databases.discard()
        error = OutboxError(f"a fault of the worker itself: {err!r}", reason=Reason.INTERNAL_ERROR)
    return outcomes.Failed(error)
