"""A divided processor has several owners: the one that needs attention speaks; one stopped partition stops no other."""

from __future__ import annotations

from outbox_core.report import CheckpointView, LeaseView, PartitioningView, Reason, WorkerState
from outbox_core.spec import Mode
from outbox_operator.decision.decide import decide
from tests.unit.operator.building import (
    NOW,
    build_conflict,
    build_observed,
    build_pod,
    build_processor,
    build_report,
    summary_of,
)

DIVIDED = build_processor(delivery={"mode": "Partitioned", "partitions": {"count": 2}}, worker={"replicas": 2})
LEASES = [LeaseView(partition=0, epoch=4, pod="orders-0"), LeaseView(partition=1, epoch=7, pod="orders-1")]
PAIRS = [CheckpointView(partition=0, pair="1000:5"), CheckpointView(partition=1, pair="999:80")]


def report(pod, state=WorkerState.ACTIVE, reason=Reason.RUNNING, **fields):
    found = build_report(state, reason, pod=pod, lease=LeaseView(pod=pod, held=True), leases=LEASES, **fields)
    return found.model_copy(update={"checkpoints": PAIRS})


def observe(*reports):
    return build_observed(*(build_pod(each.pod, each) for each in reports), processor=DIVIDED)


def test_status_says_who_owns_which_partition_and_how_far_it_is():
    status = decide(observe(report("orders-0"), report("orders-1")), NOW).status
    assert [(p.partition, p.pod, p.epoch, p.pair) for p in status.partitions] == [
        (0, "orders-0", 4, "1000:5"),
        (1, "orders-1", 7, "999:80"),
    ]
    assert status.mode == Mode.PARTITIONED
    assert status.owner is not None
    assert status.owner.pod == "2 pods"
    assert status.checkpoint is not None
    assert (status.checkpoint.partition, status.checkpoint.pair) == (1, "999:80"), "the one furthest behind, by pair"
    assert status.checkpoint.text == "999:80"


def test_without_news_the_last_known_owners_stay():
    before = decide(observe(report("orders-0")), NOW).status
    after = decide(build_observed(processor=DIVIDED, previous=before), NOW).status
    assert after.partitions == before.partitions


def test_the_owner_that_needs_attention_speaks():
    failing = report("orders-1", WorkerState.RETRYING, Reason.HANDLER_FAILED, message="partition 1: no", attempt=2)
    for reports in ((report("orders-0"), failing), (failing, report("orders-0"))):
        status = decide(observe(*reports), NOW).status
        assert status.phase == "Retrying"
        assert "partition 1: no" in next(c.message for c in status.conditions if c.type == "Ready")


def test_a_blocked_partition_leaves_the_others_their_pods():
    conflict = build_conflict(2).model_copy(update={"partition": 1})
    blocked = report(
        "orders-1", WorkerState.BLOCKED, Reason.CHECKPOINT_AHEAD, conflicts=summary_of(conflict, opened=True)
    )
    decision = decide(observe(report("orders-0"), blocked), NOW)
    assert (decision.status.phase, decision.replicas) == ("Blocked", 2)
    ready = next(c for c in decision.status.conditions if c.type == "Ready")
    assert (ready.status, ready.reason) == ("False", "CheckpointAhead")
    assert "Nothing of partition 1 is handled" in ready.message
    healthy = next(c for c in decision.status.conditions if c.type == "CheckpointHealthy")
    assert healthy.status == "False"


def test_advice_stands_in_ready():
    status = decide(observe(report("orders-0", advice="build an index")), NOW).status
    ready = next(c for c in status.conditions if c.type == "Ready")
    assert (ready.status, ready.message) == ("True", "messages are being handled; build an index")


def changing(pod="orders-0", state=WorkerState.ACTIVE, reason=Reason.RUNNING, **fields):
    said = "changing partitions 4 -> 2: 3 of 4 at the barrier, waiting for partition 1: message 'm-7' of key 'ann'"
    view = PartitioningView(count=4, next_count=2, at_barrier=3, message=said)
    return report(pod, state, reason, **fields).model_copy(update={"partitioning": view})


def answer(status, kind):
    found = next(c for c in status.conditions if c.type == kind)
    return found.status, found.reason, found.message


def test_a_change_of_the_number_is_under_way_and_names_what_it_waits_for():
    status = decide(observe(changing()), NOW).status
    said = changing().partitioning.message
    assert answer(status, "Ready") == ("False", "ChangingPartitions", said)
    assert answer(status, "Reconciling") == ("True", "ChangingPartitions", said)
    assert answer(status, "Stalled")[0] == "False"
    assert status.partitioning is not None
    assert (status.partitioning.count, status.partitioning.next_count, status.partitioning.at_barrier) == (4, 2, 3)
    assert status.phase == "Running"


def test_what_stops_the_change_is_said_with_it():
    stopped = changing(state=WorkerState.STOPPED, reason=Reason.ATTEMPTS_EXHAUSTED, message="gave up at 'm-7'")
    status = decide(observe(stopped), NOW).status
    assert answer(status, "Ready")[2] == f"gave up at 'm-7'; {stopped.partitioning.message}"
    assert answer(status, "Stalled")[0] == "True"


def test_a_number_that_is_not_asked_for_in_the_database_yet_is_not_ready():
    other = report("orders-0").model_copy(update={"partitioning": PartitioningView(count=4)})
    status = decide(observe(other), NOW).status
    assert answer(status, "Ready") == (
        "False", "ChangingPartitions", "4 partitions shall become 2; no worker has drawn the barrier yet",
    )  # fmt: skip
    as_asked = report("orders-0").model_copy(update={"partitioning": PartitioningView(count=2)})
    after = decide(build_observed(build_pod("orders-0", as_asked), processor=DIVIDED, previous=status), NOW).status
    assert answer(after, "Ready")[0] == "True"
    unheard = decide(build_observed(processor=DIVIDED, previous=status), NOW).status
    assert unheard.partitioning == status.partitioning, "without news the last known value stays"
