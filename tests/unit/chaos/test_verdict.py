"""The judge says no to each broken promise, names it, and says yes to a clean run."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from tests.tools.chaos.cases import CASES, Ending
from tests.tools.chaos.verdict import Evidence, check_judge, find_missing, judge, last_pairs, partition_of
from tests.tools.ledger.account import Handled
from tests.tools.ledger.commitlog import Committed
from tests.tools.ledger.history import Effect, Held, Stored

BY_NAME = {case.name: case for case in CASES}
SQL, RABBITMQ = BY_NAME["ordered-sql"], BY_NAME["ordered-rabbitmq"]
DIVIDED = BY_NAME["partitioned-sql"]
STREAM, TOPIC, TRANSACTIONS = BY_NAME["stream-ordered"], BY_NAME["kafka-ordered"], BY_NAME["kafka-once-ordered"]
SNAPSHOT, COMPETING = BY_NAME["snapshot-ordered-sql"], BY_NAME["competing-sql"]


def make_produced(count: int = 60, keys: int = 9) -> list[Committed]:
    return [
        Committed(f"id-{n}", (700 + n // 4, 9_000 - n // 4 * 10 + n % 4), f"key-{n % keys}", n // keys + 1, n, 0, 0)
        for n in range(count)
    ]


PRODUCED = make_produced()
HANDLED = [Handled(m.message_id, m.key, m.sequence, m.cents) for m in PRODUCED]


def make_evidence(case, handled=None, **fields) -> Evidence:
    """A run without a fault: every message as one batch, epochs 1 and then 2."""
    handled = HANDLED if handled is None else handled
    stored, effects, held = [], [], []
    for n, message in enumerate(PRODUCED):
        partition = partition_of(message.key, case.partitions)
        epoch = 1 if n < 30 else 2
        stored.append(Stored(n, partition, message.pair))
        held.append(Held(n, partition, epoch, f"pod-{epoch}"))
        effects.append(Effect(n, partition, epoch, f"pod-{epoch}", f"pod-{epoch}"))
    final: dict[int, tuple[int, ...]] = {**last_pairs(PRODUCED, case.partitions)}
    evidence = Evidence(handled, stored, held, effects, final, partitions=case.partitions)
    if case.ending is Ending.BEYOND_LAST:
        evidence = replace(evidence, final={0: (10_000, 1)})
    return replace(evidence, **fields)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_clean_run_of_every_case_has_no_violation(case) -> None:
    verdict = judge(case, PRODUCED, make_evidence(case))
    assert verdict.violations == ()
    assert (verdict.account.produced, verdict.account.handled) == (60, 60)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_evidence_that_is_missing_is_named(case) -> None:
    whole = make_evidence(case)
    assert find_missing(case, whole) == []
    leases = [f"{case.name}: no sample of a lease"] if case.fenced else []
    assert find_missing(case, replace(whole, held=())) == leases
    assert find_missing(case, replace(whole, effects=())) == [f"{case.name}: no effect with the time of its commit"]
    assert f"{case.name}: no sample of a checkpoint" in find_missing(case, replace(whole, stored=()))
    others = [sample for sample in whole.stored if sample.partition]
    assert f"{case.name}: no sample of the checkpoint of partition 0" in find_missing(
        case, replace(whole, stored=others)
    )


@pytest.mark.parametrize(
    ("case", "handled", "said"),
    [
        pytest.param(SQL, HANDLED[:20] + HANDLED[21:], "is lost", id="a message is lost"),
        pytest.param(SQL, [*HANDLED, HANDLED[7]], "stands 2 times", id="an effect stands twice"),
        pytest.param(STREAM, [*HANDLED, HANDLED[7]], "stands 2 times", id="a stream has it twice"),
        pytest.param(TRANSACTIONS, [*HANDLED, HANDLED[7]], "stands 2 times", id="a topic has it twice"),
        pytest.param(TOPIC, HANDLED[1:], "is lost", id="a topic has lost it"),
        pytest.param(TOPIC, [HANDLED[9], *HANDLED[:9], *HANDLED[10:]], "came after", id="swap within a key of a topic"),
        pytest.param(SQL, [HANDLED[1], HANDLED[0], *HANDLED[2:]], "came after", id="two messages changed places"),
        pytest.param(SQL, [*HANDLED, Handled("x", "key-0", 99)], "never committed", id="one was rolled back"),
        pytest.param(RABBITMQ, HANDLED[1:], "is lost", id="AtLeastOnce and yet lost"),
        pytest.param(
            RABBITMQ, [*HANDLED, replace(HANDLED[3], message_id="new")], "came as new", id="duplicate with another id"
        ),
        pytest.param(DIVIDED, [HANDLED[9], *HANDLED[:9], *HANDLED[10:]], "came after", id="swap within a key"),
    ],
)
def test_broken_account_is_a_violation_that_names_the_message(case, handled, said) -> None:
    verdict = judge(case, PRODUCED, make_evidence(case, handled))
    assert any(said in violation for violation in verdict.violations)


@pytest.mark.parametrize("case", [RABBITMQ, TOPIC], ids=["rabbitmq", "kafka"])
def test_an_allowed_duplicate_is_not_named_among_violations(case) -> None:
    violations = judge(case, PRODUCED, make_evidence(case, [*HANDLED[1:], HANDLED[5]])).violations
    assert [text.partition(" (")[0] for text in violations] == ["key-0#1"]


@pytest.mark.parametrize("case", [RABBITMQ, TOPIC], ids=["rabbitmq", "kafka"])
def test_duplicates_are_counted_and_allowed_where_the_broker_cannot_take_part(case) -> None:
    verdict = judge(case, PRODUCED, make_evidence(case, [*HANDLED[:30], *HANDLED[10:]]))
    assert verdict.violations == ()
    assert verdict.account.duplicated == 20


def test_keys_of_a_divided_processor_may_pass_each_other() -> None:
    by_key = sorted(HANDLED, key=lambda trace: (trace.key, trace.sequence))
    assert judge(DIVIDED, PRODUCED, make_evidence(DIVIDED, by_key)).violations == ()
    assert judge(SQL, PRODUCED, make_evidence(SQL, by_key)).violations != ()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        pytest.param(
            {"stored": [Stored(1, 0, (9, 1)), Stored(2, 0, (8, 5))]}, "moved back from (9, 1) to (8, 5)",
            id="checkpoint moves back although half of the pair grows",
        ),
        pytest.param(
            {"held": [Held(1, 0, 4, "a"), Held(2, 0, 4, "b")]}, "epoch 4 of partition 0 is a's and b's",
            id="one epoch for two owners",
        ),
        pytest.param(
            {"held": [Held(1, 0, 5, "a"), Held(2, 0, 4, "b")]}, "epoch 4 of partition 0 after epoch 5",
            id="an epoch that was over",
        ),
        pytest.param(
            {"effects": [Effect(1, 0, 2, "b", "b"), Effect(2, 0, 1, "a", "a")]}, "epoch 1 of partition 0 came after",
            id="a former owner commits after the next",
        ),
        pytest.param(
            {"effects": [Effect(1, 0, 2, "a", "b")]}, "handled by a while b held it", id="handled by who holds nothing"
        ),
        pytest.param({"final": {0: (1, 1)}}, "partition 0 ends at (1, 1)", id="not at the last message"),
        pytest.param({"final": {}}, "partition 0 ends at None", id="no checkpoint at all"),
        pytest.param({"complaints": ["pod-3 ended by itself with 1"]}, "ended by itself", id="a process that ended"),
    ],
)  # fmt: skip
def test_broken_history_is_a_violation(fields, said) -> None:
    violations = judge(SQL, PRODUCED, make_evidence(SQL, **fields)).violations
    assert any(said in violation for violation in violations), violations


def test_a_pair_grows_though_its_position_falls() -> None:
    stored = [Stored(1, 0, (8, 5)), Stored(2, 0, (9, 1)), Stored(3, 1, (2, 2)), Stored(4, 0, (9, 1))]
    assert judge(SQL, PRODUCED, make_evidence(SQL, stored=stored)).violations == ()


def make_overtaken() -> tuple[list[Committed], list[Handled]]:
    """Commits of two producers in an order that is not that of their pairs, and handled as they were committed."""
    produced = [
        Committed("early-id", (700, 9), "shared", 2, 1, 0, 0),
        Committed("late-id", (701, 5), "shared", 1, 1, 0, 1),
    ]
    return produced, [Handled(m.message_id, m.key, m.sequence, m.cents) for m in reversed(produced)]


def test_commit_order_is_what_the_cursor_snapshot_owes_and_the_pairs_what_the_other_does() -> None:
    produced, as_committed = make_overtaken()
    as_paired = as_committed[::-1]
    for case, right, wrong in ((SNAPSHOT, as_committed, as_paired), (DIVIDED, as_paired, as_committed)):
        assert judge(case, produced, Evidence(right)).account.out_of_order == 0
        verdict = judge(case, produced, Evidence(wrong))
        assert verdict.account.out_of_order == 1
        assert any("came after shared#" in violation for violation in verdict.violations)
    assert judge(COMPETING, produced, Evidence(as_paired)).account.out_of_order is None


def test_checkpoint_that_moved_back_is_counted() -> None:
    stored = [Stored(1, 0, (0, 7)), Stored(2, 0, (0, 6)), Stored(3, 0, (0, 8))]
    assert judge(SNAPSHOT, PRODUCED, make_evidence(SNAPSHOT, stored=stored)).moved_back == 1


@pytest.mark.parametrize(
    ("case", "fields", "said"),
    [
        pytest.param(SNAPSHOT, {"unexamined": {0: 3}}, "3 messages of partition 0 are left", id="in no window"),
        pytest.param(SNAPSHOT, {"final": {}}, "partition 0 has no checkpoint", id="no snapshot range at all"),
        pytest.param(COMPETING, {"final": {0: (1, 1)}}, "ends at (1, 1)", id="the outbox is not done"),
        pytest.param(BY_NAME["queue-sql"], {"unexamined": {0: 1}}, "are left", id="the queue is not empty"),
        pytest.param(SQL, {"final": {0: (10_000, 1)}}, "ends at (10000, 1)", id="beyond what there is"),
        pytest.param(
            DIVIDED, {"partitions": 5, "final": {0: (10_000, 1)}}, "ends at", id="beyond, and not at a barrier"
        ),
    ],
)
def test_case_that_is_not_at_its_end_is_a_violation(case, fields, said) -> None:
    violations = judge(case, PRODUCED, make_evidence(case, **fields)).violations
    assert any(said in violation for violation in violations), violations


def test_partition_without_a_message_stays_at_the_stop_line_or_passes_what_others_have() -> None:
    line = (10_000, 2**63 - 1)
    evidence = make_evidence(DIVIDED, partitions=8, final=dict.fromkeys(range(8), line))
    assert judge(DIVIDED, PRODUCED, evidence).violations == ()
    below = (1, 2**63 - 1)
    assert judge(DIVIDED, PRODUCED, replace(evidence, final=dict.fromkeys(range(8), below))).violations != ()
    apart = BY_NAME["apart-partitioned-sql"]
    assert judge(apart, PRODUCED, replace(evidence, partitions=4)).violations != (), "its messages are elsewhere"
    assert judge(SQL, PRODUCED, make_evidence(SQL, final={0: line})).violations != (), "it is not divided"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("seed", range(10))
def test_self_test_finds_every_planted_fault(case, seed) -> None:
    assert check_judge(case, PRODUCED, make_evidence(case), Random(seed)) == []


def test_self_test_says_no_to_evidence_in_which_nothing_can_be_found() -> None:
    blind = make_evidence(SQL, [Handled("x", "nobody's", n) for n in range(9)])
    assert any("planted one loss" in line for line in check_judge(SQL, PRODUCED, blind, Random(1)))
    assert check_judge(SQL, PRODUCED, make_evidence(SQL, []), Random(1)) == ["empty"]


def test_partition_is_the_documented_one_and_the_products_own() -> None:
    from outbox_core.partition import partition_of as products

    assert all(partition_of(f"order-{n}", 4) == products(f"order-{n}", 4) for n in range(500))
