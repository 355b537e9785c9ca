"""The grants that sql/README.md lists are enough, and nothing more is needed or had."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from outbox_core.config import Resolution
from outbox_core.errors import ConfigurationError
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import BEGINNING, StoreAnswer
from outbox_core.report import Reason, ResourceRef
from outbox_core.spec import StartFrom
from outbox_sql import runner
from outbox_worker.postgres import identity, schema
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.ownership import leases as ownership
from outbox_worker.postgres.progress import checkpoints, conflicts, starts
from outbox_worker.postgres.reading import stall
from outbox_worker.postgres.reading.messages import MessageReader
from tests.support.servers.postgres import VERSIONS, build_source

KEY = ProcessorKey("outbox", "orders")
RESOURCE = ResourceRef(cluster="c", namespace="n", name="a", uid="u1")
SOURCE = build_source(schema="Verify")
README = Path(runner.__file__).parent / "README.md"


def grants(heading):
    """The statements of the README's code block under a heading."""
    text = README.read_text().split(f"### {heading}\n")[1]
    (block, *_) = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    return block


@pytest.fixture(params=VERSIONS)
def granted(servers, request):
    with servers.database(request.param) as database:
        database.direct().execute(grants("A producer"))
        database.direct().execute(grants("A processor"))
        yield database


def test_a_processors_whole_life(granted):
    producer, worker = granted.direct("producer"), granted.connect("processor")
    producer.execute("INSERT INTO outbox.messages (message_type, data) VALUES ('m', '{}')")
    reader, token, hour = MessageReader(SOURCE), uuid4(), timedelta(hours=1)

    schema.ensure_schema(worker, SOURCE)
    identity.check_identity(worker, SOURCE, KEY)
    assert ownership.claim(worker, KEY, RESOURCE).granted
    lease = ownership.acquire_lease(worker, KEY, claim_uid="u1", pod="pod", token=token, lease=hour)
    assert lease.epoch is not None
    start = checkpoints.ensure_start(
        worker,
        KEY,
        HeldLease(0, lease.epoch, token),
        SOURCE,
        lambda: starts.compute_start(worker, SOURCE, StartFrom()),
    )
    assert start is not None
    batch = reader.fetch(worker, start.pair, 10)
    ownership.limit_transaction(worker, hour)
    stored = checkpoints.store(worker, KEY, HeldLease(0, lease.epoch, token), new=batch.examined, expected=BEGINNING)
    assert stored is StoreAnswer.STORED
    assert checkpoints.settle(worker, KEY, HeldLease(0, lease.epoch, token)).pair == batch.examined
    assert ownership.renew_lease(worker, KEY, HeldLease(0, lease.epoch, token), lease=hour)
    stall.HighWaterMarkObserver(reader).observe(worker)
    reader.lag(worker, batch.examined)
    assert ownership.release_lease(worker, KEY, HeldLease(0, lease.epoch, token))
    refusal = conflicts.Refusal(
        code=StoreAnswer.AHEAD, expected=BEGINNING, stored=batch.examined, new=batch.examined, epoch=1, pod="pod",
        claim_uid="u1", needs_person=True,
    )  # fmt: skip
    number = conflicts.record_refusal(worker, KEY, refusal)
    assert conflicts.summary(worker, KEY).open is not None
    decision = Resolution(conflict_id=number, action="Accept", pair=str(batch.examined))
    assert conflicts.resolve(worker, "outbox", decision) is conflicts.ResolveAnswer.DONE
    assert ownership.vacate_claim(worker, KEY, "u1")
    assert ownership.release_claim(worker, KEY, "u1")


@pytest.mark.parametrize(
    "forbidden",
    [
        "SELECT * FROM outbox.messages",
        "DELETE FROM outbox.messages",
        "SELECT * FROM outbox.claim_processor('p', 'c', 'n', 'a', 'u')",
        "SELECT outbox.store_processor_checkpoint('p'::text, 5::bigint, NULL::bigint, '5'::xid8)",
        "UPDATE outbox.processor_checkpoints SET last_processed_position = 0",
    ],
)
def test_a_producer_can_only_insert(granted, forbidden):
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        granted.direct("producer").execute(forbidden)


@pytest.mark.parametrize(
    "forbidden",
    [
        "UPDATE outbox.processor_checkpoints SET last_processed_position = 0",
        "INSERT INTO outbox.processor_claims VALUES ('p', 'c', 'n', 'a', 'u')",
        "UPDATE outbox.processor_leases SET token = gen_random_uuid()",
        "DELETE FROM outbox.processor_conflicts",
        "INSERT INTO outbox.messages (message_type, data) VALUES ('m', '{}')",
        "SELECT outbox.confirm_identity('keep')",
        "CREATE TABLE outbox.mine (x int)",
    ],
)
def test_a_processor_can_only_call_the_contract(granted, forbidden):
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        granted.direct("processor").execute(forbidden)


def test_a_stranger_can_do_nothing(granted):
    with pytest.raises(ConfigurationError) as caught:
        ownership.claim(granted.connect("stranger"), KEY, RESOURCE)

    assert caught.value.reason is Reason.PERMISSION_DENIED


def test_a_shadowing_object_of_the_caller_is_not_used(granted):
    """The functions run with their owner's rights: a temporary table of the caller must not get between."""
    worker = granted.direct("processor")
    worker.execute("CREATE TEMPORARY TABLE processor_claims (LIKE outbox.processor_claims)")
    worker.execute("SELECT * FROM outbox.claim_processor('orders', 'c', 'n', 'a', 'u1')")

    assert worker.execute("SELECT count(*) FROM outbox.processor_claims").fetchone() == (1,)
    assert worker.execute("SELECT count(*) FROM pg_temp.processor_claims").fetchone() == (0,)


def test_an_age_is_shown_to_whom_the_readme_says(granted):
    stranger = granted.direct("stranger", autocommit=False)
    stranger.execute("SELECT pg_current_xact_id()")
    granted.direct("producer").execute("INSERT INTO outbox.messages (message_type, data) VALUES ('m', '{}')")

    before = stall.observe_high_water_mark(granted.connect("processor"))
    granted.direct().execute(grants("To see how long others have held reading back"))
    after = stall.observe_high_water_mark(granted.connect("processor"))
    granted.direct().execute("REVOKE pg_read_all_stats FROM processor")

    assert "role stranger" in (before.holder or "")
    assert before.age_seconds == 0
    assert after.age_seconds > 0
