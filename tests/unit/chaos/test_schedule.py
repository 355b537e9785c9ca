"""A seed is a schedule: the same faults at the same times, whatever else runs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.test_chaos import SECONDS
from tests.tools.chaos.cases import CASES, COUNTS, PARTITIONS, Target, select_cases
from tests.tools.chaos.config import build_config, build_handler
from tests.tools.chaos.faults import Struck
from tests.tools.chaos.rounds import MOST_AT_ONCE, SEED, deal_rounds, draw_sample
from tests.tools.chaos.schedule import LAST, Fault, Kind, as_json, build_schedule, find_not_struck, strikes

ROOT = Path(__file__).resolve().parents[3]
SEEDS = range(20)
BROKERS = {Kind.BROKER, Kind.KAFKA, Kind.KAFKA_CRASH}
SERVERS = {Kind.POSTGRES, Kind.BACKEND, Kind.REPORTING, Kind.DISK, *BROKERS}
BESIDE_TRANSACTIONS = set(Kind) - {Kind.KAFKA_CRASH}


@pytest.mark.parametrize("seed", SEEDS)
def test_same_seed_gives_the_same_faults_at_the_same_times(seed) -> None:
    assert build_schedule(seed, 300, CASES) == build_schedule(seed, 300, CASES)


def test_another_process_draws_the_same() -> None:
    command = [sys.executable, "-m", "tests.tools.chaos", "--schedule", "--seed", "7", "--seconds", "120"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert json.loads(said) == json.loads(json.dumps(as_json(7, 120, CASES, build_schedule(7, 120, CASES))))


def test_another_seed_gives_other_faults() -> None:
    assert len({json.dumps(as_json(0, 300, CASES, build_schedule(seed, 300, CASES))) for seed in SEEDS}) == len(SEEDS)


def test_a_case_alone_meets_the_faults_that_it_meets_among_others() -> None:
    of_all = [fault for fault in build_schedule(3, 300, CASES) if fault.case == "ordered-rabbitmq"]
    alone = build_schedule(3, 300, select_cases(["ordered-rabbitmq"]))
    assert [fault for fault in alone if fault.case] == of_all
    (case,) = select_cases(["ordered-rabbitmq"])
    of_servers = [fault for fault in build_schedule(3, 300, CASES) if not fault.case and strikes(fault, case)]
    assert [fault for fault in alone if not fault.case] == of_servers


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = build_schedule(5, 120, CASES), build_schedule(5, 600, CASES)
    assert [fault for fault in long if fault in short] == short


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kind_comes_in_a_run_of_three_minutes(seed) -> None:
    schedule = build_schedule(seed, 180, CASES)
    assert {fault.kind for fault in schedule} == BESIDE_TRANSACTIONS


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_a_lane_follow_each_other_and_leave_time_to_recover(seed) -> None:
    schedule = build_schedule(seed, 300, CASES)
    for lane in {fault.lane for fault in schedule}:
        faults = [fault for fault in schedule if fault.lane == lane]
        assert all(one.ends < other.at for one, other in pairwise(faults))
        assert faults[-1].ends <= 300 - LAST
    assert {fault.kind for fault in schedule if not fault.case} <= SERVERS
    assert not {fault.kind for fault in schedule if fault.case} & SERVERS


def test_no_broker_and_no_other_database_no_fault_of_them() -> None:
    cases = select_cases(["ordered-sql", "partitioned-python"])
    schedule = build_schedule(1, 600, cases)
    assert not {*BROKERS, Kind.REPORTING} & {fault.kind for fault in schedule}
    assert not any(fault.target for fault in schedule)


def test_the_connection_to_the_target_is_struck_where_there_is_one() -> None:
    others = ["apart-ordered-sql", "ordered-rabbitmq", "stream-ordered", "kafka-ordered"]
    schedule = build_schedule(1, 600, select_cases([*others, "ordered-sql"]))
    assert {fault.case for fault in schedule if fault.target} == set(others)


def test_each_broker_is_struck_where_a_case_publishes_to_it() -> None:
    struck = {
        name: {fault.kind for fault in build_schedule(1, 600, select_cases(name.split()))} & BROKERS
        for name in (
            "ordered-sql",
            "stream-ordered",
            "kafka-ordered",
            "kafka-once-ordered",
            "kafka-ordered kafka-once-*",
        )
    }
    assert list(struck.values()) == [set(), {Kind.BROKER}, {Kind.KAFKA, Kind.KAFKA_CRASH}, {Kind.KAFKA}, {Kind.KAFKA}]


def test_partitions_are_changed_where_they_can_be() -> None:
    changed = {fault.case for fault in build_schedule(1, 600, CASES) if fault.kind in (Kind.DIVIDE, Kind.DIVIDE_FROZEN)}
    assert changed == {case.name for case in CASES if case.changes}
    assert changed >= {"partitioned-sql", "partitioned-python", "partitioned-rabbitmq"}


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_rounds_hold_each_case_once_and_meet_every_kind_that_can_strike_them(seed) -> None:
    rounds = deal_rounds(seed, CASES)
    assert sorted(case.name for one in rounds for case in one) == sorted(case.name for case in CASES)
    for cases in rounds:
        assert len(cases) <= MOST_AT_ONCE
        assert len({case.mode for case in cases}) >= 4
        schedule = build_schedule(seed, 180, cases)
        possible = {fault.kind for fault in build_schedule(seed, 500, cases)}
        assert {fault.kind for fault in schedule} == possible


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sample_has_every_mode_a_broker_and_another_database(seed) -> None:
    sample = draw_sample(seed, CASES)
    assert sample == draw_sample(seed, CASES)
    assert [case.mode.partition(",")[0] for case in sample][:2] == ["Ordered", "Partitioned"]
    assert [case.apart for case in sample] == [False, False, False, False, True, False, False]
    assert sample[2].source == {"cursor": "Snapshot"}
    assert sample[3].mode.startswith("Competing")
    assert any(case.target is Target.RABBITMQ for case in sample)
    assert [case.target for case in sample[5:]] == [Target.STREAM, Target.KAFKA]


def test_samples_come_to_every_case() -> None:
    assert {case.name for seed in range(100) for case in draw_sample(seed, CASES)} == {case.name for case in CASES}


def test_cases_are_chosen_by_name_or_by_what_they_begin_with() -> None:
    assert select_cases([]) == CASES
    assert {case.mode for case in select_cases(["ordered-*"])} == {"Ordered"}
    with pytest.raises(ValueError, match="no case 'orderd-sql': there are ordered-sql"):
        select_cases(["orderd-sql"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_a_configuration_that_the_worker_takes(case) -> None:
    from outbox_core.config import ProcessorConfig

    config = ProcessorConfig.model_validate(build_config(case))
    assert config.processor_id == case.name
    assert (config.delivery.partitions.count if config.delivery.partitions else 1) == case.partitions
    assert config.has_remote_target is case.apart
    changed = ProcessorConfig.model_validate(build_config(case, partitions=7, generation=2))
    assert (changed.delivery.partitions.count if changed.delivery.partitions else 1) == (
        7 if case.partitions > 1 else 1
    )
    assert len(f"outbox {case.name} worker-9999") < 64, "PostgreSQL would cut the connection's name"
    if case.target is Target.PYTHON:
        compile(build_handler(case), "orders.py", "exec")


def test_every_mode_runs_with_messages_that_fail_for_a_while(monkeypatch) -> None:
    cases = [case for case in CASES if case.failing]
    assert [case.mode for case in cases] == ["Ordered", "Partitioned", "Competing"]
    assert not any(case.failing for case in CASES if not case.name.startswith("failing-"))
    for case in cases:
        names: dict[str, Any] = {}
        exec(build_handler(case), names)  # our own text
        rows, now, failed = [(f"message-{n}", "key", 1, 1) for n in range(1000)], time.monotonic(), []
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        for row in rows:
            try:
                names["fail_some"]([row])
            except ValueError:
                failed.append(row)
        assert 30 < len(failed) < 100
        monkeypatch.setattr(time, "monotonic", lambda now=now: now + 1)
        names["fail_some"](rows)


def test_another_number_of_partitions_is_never_below_the_most_replicas() -> None:
    most = max(fault.amount for seed in SEEDS for fault in build_schedule(seed, 600, CASES) if fault.kind is Kind.SCALE)
    assert most <= min(COUNTS) == PARTITIONS


def carry_out(fault: Fault, *, expired: bool = True) -> Struck:
    return Struck(fault, fault.at, fault.ends, fault.ends, expired=expired)


def test_a_run_that_did_not_strike_as_it_should_says_so() -> None:
    schedule = build_schedule(1, 300, CASES)
    all_of_it = [carry_out(fault) for fault in schedule]
    assert find_not_struck(schedule, all_of_it) == []
    assert find_not_struck([], []) == []
    (said,) = find_not_struck(schedule, [one for one in all_of_it if one.fault.kind is not Kind.DISK])
    assert said == "fill the disk: it was scheduled, and never struck"
    asleep = [carry_out(fault, expired=fault.kind is not Kind.FREEZE_IN_BATCH) for fault in schedule]
    (said,) = find_not_struck(schedule, asleep)
    assert said.startswith("freeze in mid-batch: none lost its lease")
    half = [one for number, one in enumerate(all_of_it) if number % 2]
    assert f"{len(schedule) - len(half)} of {len(schedule)} faults were left out" in find_not_struck(schedule, half)[-1]


def test_the_seed_of_make_test_strikes_with_every_kind() -> None:
    cases = draw_sample(SEED, CASES)
    schedule = build_schedule(SEED, SECONDS, cases)
    assert {fault.kind for fault in schedule} == BESIDE_TRANSACTIONS
    frozen = [fault.case for fault in schedule if fault.kind is Kind.FREEZE_IN_BATCH]
    assert set(frozen) == {case.name for case in cases}
    assert [case.name for case in cases[5:]] == ["stream-partitioned", "kafka-once-snapshot-partitioned"]


def test_processors_that_share_the_processes_of_a_case_are_told_apart() -> None:
    (case,) = select_cases(["shared-snapshot-ordered-rabbitmq"])
    together = (case, *case.companions)
    assert [each.target for each in together] == [Target.RABBITMQ, Target.SQL, Target.SQL, Target.SQL]
    assert len({each.table for each in together}) == len({build_config(each)["processorId"] for each in together}) == 4
    assert not any(each.companions for each in case.companions)
    assert not {each.name for each in case.companions} & {each.name for each in CASES}
