"""A connection cut during COMMIT: the owner finds out what is stored, adopts it, and nobody reports a conflict."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from outbox_core.errors import TransientError
from outbox_core.processor.outcomes import HeldLease
from outbox_core.progress.checkpoint import Checkpoint, StoreAnswer
from outbox_worker.postgres.errors import translate
from outbox_worker.postgres.key import ProcessorKey
from outbox_worker.postgres.progress import checkpoints, conflicts
from tests.support.database.contract import own, put, stored
from tests.support.servers.postgres import POOLED
from tests.support.servers.proxy import CommitCutter, Cut

KEY = ProcessorKey("outbox", "orders")
TOKEN = uuid4()
OLD, NEW, NEXT = Checkpoint(10, 1), Checkpoint(20, 5), Checkpoint(30, 9)


@pytest.fixture(params=["15", POOLED])
def place(servers, request):
    with servers.database(request.param) as database:
        database.direct().execute("CREATE TABLE public.effects (what text)")
        yield database


@pytest.fixture
def proxy(place):
    cutter = CommitCutter(place.port)
    yield cutter
    cutter.close()


def settle(database, epoch):
    """As a worker does: ask until the old transaction is over."""
    for _ in range(20):
        try:
            return checkpoints.settle(database.connect(), KEY, HeldLease(0, epoch, TOKEN))
        except TransientError:
            continue
    raise AssertionError("the old transaction never ended")


@pytest.mark.parametrize("row", [None, OLD], ids=["first checkpoint", "a checkpoint"])
@pytest.mark.parametrize("cut", list(Cut), ids=lambda cut: cut.name)
def test_the_owner_adopts_what_is_stored(place, proxy, cut, row):
    epoch = own(place, str(TOKEN))
    put(place.direct(), None if row is None else (row.transaction_id, row.position))
    batch = place.connect(autocommit=False, port=proxy.port)
    batch.execute("SELECT set_config('idle_in_transaction_session_timeout', '3s', true)")
    batch.execute("INSERT INTO public.effects VALUES ('once')")
    answer = checkpoints.store(batch, KEY, HeldLease(0, epoch, TOKEN), new=NEW, expected=row)
    assert answer is StoreAnswer.STORED
    proxy.arm(cut)

    with pytest.raises(psycopg.OperationalError) as lost:
        batch.commit()
    assert isinstance(translate(lost.value), TransientError)
    settled = settle(place, epoch)

    committed = cut is Cut.AFTER
    assert settled == checkpoints.Settled(owned=True, pair=NEW if committed else row)
    assert place.direct().execute("SELECT count(*) FROM public.effects").fetchone() == (int(committed),)
    # from what it adopted it goes on, and is told 1: no conflict
    following = NEXT if committed else NEW
    answer = checkpoints.store(place.connect(), KEY, HeldLease(0, epoch, TOKEN), new=following, expected=settled.pair)
    assert answer is StoreAnswer.STORED
    assert stored(place.direct()) == (following.transaction_id, following.position)
    assert conflicts.summary(place.connect(), KEY).count == 0
