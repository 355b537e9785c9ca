"""The end of a worker: give the lease back, and do with the claim what the operator said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from outbox_core.errors import OutboxError
from outbox_core.report import Intent
from outbox_worker.logs import get_logger
from outbox_worker.postgres import ownership as calls
from outbox_worker.postgres import partitions
from outbox_worker.shutdown import Interrupted
from outbox_worker.speaker import Speaker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from outbox_worker.steps import Parts

_log = get_logger("outbox.worker")


def give_back(lanes: Sequence[Parts]) -> None:
    """Release every lease; keep, release or vacate the claim. What cannot be given back lapses by itself.

    Call it after the heartbeat stopped: it would say the claim again.
    """
    parts = lanes[0]
    claimed = any(lane.ownership.claimed for lane in lanes)
    if not claimed and all(lane.ownership.lease is None for lane in lanes):
        return
    try:
        parts.shutdown.last(lambda: _give_back(lanes, claimed=claimed))
    except (OutboxError, psycopg.Error, Interrupted) as err:
        _log.warning("could not give lease and claim back; they lapse by themselves", extra={"error": str(err)})


def _give_back(lanes: Sequence[Parts], *, claimed: bool) -> None:
    parts = lanes[0]
    connection = parts.databases.home.connection()
    if parts.config.delivery.partitions is not None:
        partitions.end_membership(connection, parts.key, parts.token)
    for lane in lanes:
        if (lease := lane.ownership.lease) is not None:
            calls.release_lease(connection, lane.key, epoch=lease.epoch, token=lease.token)
            lane.ownership.drop_lease()
    if claimed:
        _say_last_word(parts, connection)
        _settle_claim(parts, connection)


def _say_last_word(parts: Parts, connection: psycopg.Connection[object]) -> None:
    """Leave in the database what was before the end; not worth failing for."""
    speaker = Speaker(parts.board, claim_uid=parts.config.resource.uid, pod=parts.pod, token=parts.token)
    speaker.say(connection, parts.key, parts.config.delivery.lease_duration, ended=True)


def _settle_claim(parts: Parts, connection: psycopg.Connection[object]) -> None:
    uid = parts.config.resource.uid
    match parts.board.intent:
        case Intent.KEEP_CLAIM:
            _log.info("claim kept")
        case Intent.RELEASE_CLAIM:
            _log.info("claim released", extra={"released": calls.release_claim(connection, parts.key, uid)})
        case None:
            # Nobody said why: the resource may be gone. Another one may claim after the grace; we may at any time.
            _log.info("claim vacated", extra={"vacated": calls.vacate_claim(connection, parts.key, uid)})
    parts.ownership.drop_claim()
