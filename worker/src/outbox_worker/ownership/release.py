"""The end of a worker: release the lease, and do with the claim what the operator said."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from outbox_core.errors import OutboxError
from outbox_core.report import Intent
from outbox_worker.logs import about, get_logger
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.ownership import leases as calls
from outbox_worker.shutdown import Interrupted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_worker.engine.steps import StepContext
    from outbox_worker.ownership.heartbeat import Holding
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.shutdown import Shutdown

_LAPSES: Final = "could not give everything back; it lapses by itself"
_log = get_logger("outbox.worker")


def give_back(shutdown: Shutdown, holdings: Sequence[Holding]) -> None:
    """End what the mode renews and release every lease; say the last word; keep, release or vacate the claim.

    What cannot be given back lapses by itself. Call it after the heartbeat stopped: it would say the claim again.
    """
    held = [each for each in holdings if not each.is_empty]

    def give_each() -> None:
        for each in held:
            with about(each.contexts[0].status.names):
                try:
                    _give_back(each)
                except (OutboxError, DatabaseError) as err:
                    _log.warning(_LAPSES, extra={"error": str(err)})

    try:
        if held:
            shutdown.last(give_each)
    except Interrupted as err:
        _log.warning(_LAPSES, extra={"error": str(err)})


def _give_back(holding: Holding) -> None:
    contexts, renewal, status_writer = holding
    context, claimed = contexts[0], holding.claimed
    connection = context.databases.target.connection()
    renewal.end(connection)
    for each in contexts:
        if (lease := each.ownership.lease) is not None:
            calls.release_lease(connection, each.key, lease)
            each.ownership.drop_lease()
    if claimed:
        status_writer.write(connection, context.key, context.config.delivery.lease_duration, ended=True)
        _settle_claim(context, connection)


def _settle_claim(context: StepContext, connection: Connection) -> None:
    uid = context.config.resource.uid
    match context.status.intent:
        case Intent.KEEP_CLAIM:
            _log.info("claim kept")
        case Intent.RELEASE_CLAIM:
            _log.info("claim released", extra={"released": calls.release_claim(connection, context.key, uid)})
        case None:
            # The operator did not say why: the resource may be gone. Another one may claim after the grace; we may at
            # any time.
            _log.info("claim vacated", extra={"vacated": calls.vacate_claim(connection, context.key, uid)})
    context.ownership.drop_claim()
