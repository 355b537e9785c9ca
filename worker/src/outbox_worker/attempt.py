"""One step, tried: whatever goes wrong in it becomes something that happened, in every mode."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, TypeVar

import psycopg

from outbox_core import happening as h
from outbox_core.errors import OutboxError
from outbox_core.report import Reason
from outbox_worker.logs import get_logger
from outbox_worker.postgres.errors import translate
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox_worker.steps import Parts

Happened = TypeVar("Happened")
_log = get_logger("outbox.worker")


def attempt(parts: Parts, act: Callable[[], Happened], names: Mapping[str, object]) -> Happened | h.Failed:
    """Do the step; `names` go with what is logged.

    Whatever it waits for, a locked table or a server that is gone, ends with the grace period.
    """
    try:
        return parts.shutdown.limited(inf, act)
    except OutboxError as err:
        error = err
    except psycopg.Error as err:
        error = translate(err)
    except Interrupted as err:
        parts.databases.discard()  # in the middle of whatever it was
        error = err.as_error("the step")
    except Exception as err:  # noqa: BLE001 - reported in status and tried again, like any other fault
        _log.exception("a fault of the worker itself", extra=dict(names))
        parts.databases.discard()
        error = OutboxError(f"a fault of the worker itself: {err!r}", reason=Reason.INTERNAL_ERROR)
    return h.Failed(error)
