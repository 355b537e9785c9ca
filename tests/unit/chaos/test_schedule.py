"""A seed is a schedule: the same faults at the same times, whatever else runs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.chaos.cases import CASES, Target, build_config, build_handler, select_cases
from tests.chaos.schedule import LAST, Kind, as_json, build_schedule

ROOT = Path(__file__).resolve().parents[3]
SEEDS = range(20)
SERVERS = {Kind.POSTGRES, Kind.DISK, Kind.BROKER}


@pytest.mark.parametrize("seed", SEEDS)
def test_same_seed_gives_the_same_faults_at_the_same_times(seed) -> None:
    assert build_schedule(seed, 300, CASES) == build_schedule(seed, 300, CASES)


def test_another_process_draws_the_same() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--schedule", "--seed", "7", "--seconds", "120"]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert json.loads(said) == json.loads(json.dumps(as_json(7, 120, CASES, build_schedule(7, 120, CASES))))


def test_another_seed_gives_other_faults() -> None:
    assert len({json.dumps(as_json(0, 300, CASES, build_schedule(seed, 300, CASES))) for seed in SEEDS}) == len(SEEDS)


def test_a_case_alone_meets_the_faults_that_it_meets_among_others() -> None:
    of_all = [fault for fault in build_schedule(3, 300, CASES) if fault.case == "ordered-rabbitmq"]
    alone = build_schedule(3, 300, select_cases(["ordered-rabbitmq"]))
    assert [fault for fault in alone if fault.case] == of_all
    assert [f for f in alone if not f.case] == [f for f in build_schedule(3, 300, CASES) if not f.case]


def test_a_longer_run_begins_like_a_shorter_one() -> None:
    short, long = build_schedule(5, 120, CASES), build_schedule(5, 600, CASES)
    assert [fault for fault in long if fault in short] == short


@pytest.mark.parametrize("seed", SEEDS)
def test_every_kind_comes_in_a_run_of_three_minutes(seed) -> None:
    schedule = build_schedule(seed, 180, CASES)
    assert {fault.kind for fault in schedule} == set(Kind)


@pytest.mark.parametrize("seed", SEEDS)
def test_faults_of_a_lane_follow_each_other_and_leave_time_to_recover(seed) -> None:
    schedule = build_schedule(seed, 300, CASES)
    for lane in {fault.case for fault in schedule}:
        faults = [fault for fault in schedule if fault.case == lane]
        assert all(one.ends < other.at for one, other in pairwise(faults))
        assert faults[-1].ends <= 300 - LAST
    assert {fault.kind for fault in schedule if not fault.case} <= SERVERS
    assert not {fault.kind for fault in schedule if fault.case} & SERVERS


def test_no_broker_no_fault_of_it() -> None:
    cases = select_cases(["ordered-sql", "partitioned-python"])
    schedule = build_schedule(1, 600, cases)
    assert Kind.BROKER not in {fault.kind for fault in schedule}
    assert not any(fault.broker for fault in schedule)


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
    if case.target is Target.PYTHON:
        compile(build_handler(case), "orders.py", "exec")
