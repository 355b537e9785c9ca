"""`--try-claim`, `--release-claim` and `--hand-over`: one question to the database, one report, one exit code."""

from __future__ import annotations

import sys
import time
import uuid
from typing import TYPE_CHECKING

from outbox_core.errors import OutboxError
from outbox_core.processor.state import initial_state
from outbox_core.report import ExitCode, Reason, ResourceRef, WorkerState
from outbox_worker.logs import get_logger
from outbox_worker.observe.status import Identity, ProcessStatus, write_termination
from outbox_worker.postgres import identity
from outbox_worker.postgres.errors import DatabaseError, translate
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import conflicts
from outbox_worker.settings import Act, Settings

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_worker.databases import Databases

FAILED = 1
"""Neither ours nor held: the database could not be asked; the report says why."""
_log = get_logger("outbox.worker")


def run_once(settings: Settings, config: ProcessorConfig, databases: Databases) -> int:
    """Do what `settings.act` says, print the report, leave it as termination message; return the exit code."""
    state = initial_state(time.monotonic())
    status = ProcessStatus(config, Identity(settings.pod, settings.pod_uid, str(uuid.uuid4())), state)
    key = ProcessorKey(config.source.schema_name, config.processor_id)
    code: int
    try:
        if settings.act is Act.TRY_CLAIM:
            code, message = _try_claim(databases, key, status)
        elif settings.hand_over is not None:
            code, message = _hand_over(databases, key, status, settings.hand_over)
        else:
            code, message = _release(databases, key)
        state = state._replace(message=message)
        if code == ExitCode.CLAIM_HELD:
            state = state._replace(state=WorkerState.CLAIM_REFUSED, reason=Reason.CLAIM_HELD)
    except (OutboxError, DatabaseError) as err:
        error = translate(err) if isinstance(err, DatabaseError) else err
        state = state._replace(state=WorkerState.UNAVAILABLE, reason=error.reason, message=str(error))
        code = FAILED
    finally:
        databases.discard()
    status.watch(0, lambda: state)
    report = status.report()
    sys.stdout.write(report.model_dump_json(by_alias=True) + "\n")
    write_termination(report, settings.termination_log)
    return code


def _try_claim(databases: Databases, key: ProcessorKey, status: ProcessStatus) -> tuple[ExitCode, str]:
    config, connection = databases.config, databases.target.connection()
    databases.prepare()
    if not config.has_remote_target:
        owner = identity.Owner(config.processor_id, config.resource)
        identity.check_identity(connection, config.source, key, owner)
    answer = ownership.claim(connection, key, config.resource, sweep_uids=config.sweep_uids)
    status.claim_holder = answer.holder
    status.set_observed(conflicts=conflicts.summary(connection, key))
    if answer.granted:
        return ExitCode.DONE, "the claim is this resource's"
    return ExitCode.CLAIM_HELD, f"{answer.holder or 'another resource'} owns this processorId"


def _hand_over(
    databases: Databases, key: ProcessorKey, status: ProcessStatus, place: tuple[str, str, str]
) -> tuple[ExitCode, str]:
    """Give the claim away; done before, it is done: the job may be run twice."""
    connection = databases.target.connection()
    cluster, namespace, name = place
    successor = ResourceRef(cluster=cluster, namespace=namespace, name=name, uid="")
    given = ownership.hand_over_claim(connection, key, databases.config.resource.uid, successor)
    holder = ownership.fetch_claim(connection, key).holder
    status.claim_holder = holder
    if given or (holder is not None and str(holder) == str(successor)):
        return ExitCode.DONE, f"the claim is {successor}'s"
    if holder is not None:
        return ExitCode.CLAIM_HELD, f"{holder} holds the claim"
    return ExitCode.CLAIM_HELD, "this resource never claimed the processorId"


def _release(databases: Databases, key: ProcessorKey) -> tuple[ExitCode, str]:
    try:
        released = ownership.release_claim(databases.target.connection(), key, databases.config.resource.uid)
    except OutboxError as err:
        if err.reason is not Reason.SCHEMA_MISSING:
            raise
        released = False  # no schema: nothing was ever claimed here
    _log.info("release", extra={"released": released})
    return ExitCode.DONE, "the claim is released" if released else "there was no claim of this resource"
