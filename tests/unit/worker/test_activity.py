"""The log of a worker: a line each ten seconds with what was handled, and JSON that every reader can read."""

from __future__ import annotations

import json
import logging
import time

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.processor.state import initial_state
from outbox_core.report import CheckpointView, Lag
from outbox_worker.logs import JsonFormatter, TextFormatter
from outbox_worker.observe.status import Activity, Identity, ProcessStatus

CONFIG = ProcessorConfig.model_validate(
    {
        "resource": {"cluster": "c", "namespace": "n", "name": "orders", "uid": "u"},
        "generation": 1,
        "processorId": "orders",
        "source": {"connection": {"secretRef": {"name": "db"}}},
        "target": {"log": {}},
    }
)


@pytest.fixture
def status():
    return ProcessStatus(CONFIG, Identity("pod", "uid", "instance"), initial_state(time.monotonic()))


def lines(caplog):
    return [TextFormatter().format(record).partition(" info    ")[2] for record in caplog.records]


def test_a_line_each_ten_seconds_says_what_was_handled_since_the_last(status, caplog):
    caplog.set_level(logging.INFO)
    now = [100.0]
    activity = Activity(status, lambda: now[0])
    status.set_observed(checkpoints=[CheckpointView(pair="815:42")], lag=Lag(messages=7, at_least=True, seconds=1.0))
    for second in range(1, 21):
        now[0] = 100.0 + second
        status.add_batch(30)
        activity.look()
    said = "handled messages=300 perSecond=30.0 checkpoint=815:42 lag=7+"
    assert lines(caplog) == [said, said]


def test_nothing_handled_nothing_said_and_a_rest_does_not_count(status, caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    activity = Activity(status, lambda: now[0])
    for second in range(600):
        now[0] = float(second)
        activity.look()
    activity.tell()
    assert lines(caplog) == []
    status.add_batch(5)
    now[0] += 10.0
    activity.look()
    assert lines(caplog) == ["handled messages=5 perSecond=0.5"]


def test_the_rest_is_told_at_the_end(status, caplog):
    caplog.set_level(logging.INFO)
    now = [0.0]
    activity = Activity(status, lambda: now[0])
    status.add_batch(3)
    now[0] = 2.0
    activity.look()
    activity.tell()
    activity.tell()
    assert lines(caplog) == ["handled messages=3 perSecond=1.5"]


def test_of_many_partitions_the_first_few_are_named(status, caplog):
    caplog.set_level(logging.INFO)
    status.set_observed(checkpoints=[CheckpointView(partition=number, pair=f"8:{number}") for number in range(6)])
    activity = Activity(status)
    status.add_batch(1)
    activity.tell()
    assert "checkpoint=0=8:0,1=8:1,2=8:2,3=8:3,+2 more" in lines(caplog)[0]


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_a_number_without_end_is_null_in_json_and_left_out_in_text(number):
    record = logging.makeLogRecord({"msg": "failed", "levelname": "WARNING", "retryInSeconds": number, "attempt": 1})
    line = json.loads(JsonFormatter().format(record), parse_constant=pytest.fail)
    assert (line["retryInSeconds"], line["attempt"]) == (None, 1)
    assert "retryInSeconds" not in TextFormatter().format(record)


def test_a_person_reads_the_end_of_a_transaction_id_in_the_log():
    record = logging.makeLogRecord({"msg": "state", "checkpoint": "5929:9223372036854775807"})
    assert "checkpoint=5929:end" in TextFormatter().format(record)
    assert json.loads(JsonFormatter().format(record))["checkpoint"] == "5929:9223372036854775807"
