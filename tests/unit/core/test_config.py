"""The two contracts between processes: the configuration the operator writes, the report it reads."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from pydantic import ValidationError

from outbox_core.config import ProcessorConfig, Resolution, ResolutionAction
from outbox_core.report import Conflict, ConflictSummary, Reason, Report, ResourceRef, WorkerState
from outbox_core.spec import Cursor, Engine, Guarantee, Source, Target, format_duration
from outbox_core.spec.base import format_bytes, parse_bytes, parse_duration

RESOURCE = ResourceRef(cluster="east", namespace="shop", name="orders", uid="u-1")
SOURCE = Source.model_validate({"connection": {"secretRef": {"name": "db"}}})


def config(target: dict[str, object] | None) -> ProcessorConfig:
    return ProcessorConfig(
        resource=RESOURCE,
        generation=3,
        processor_id="orders",
        source=SOURCE,
        target=Target.model_validate(target) if target else None,
    )


def test_configuration_survives_the_way_through_json() -> None:
    original = config({"sql": {"statement": "SELECT 1"}}).model_copy(
        update={"resolution": Resolution(conflict_id=7, action=ResolutionAction.REWIND, pair="815:42")}
    )
    assert ProcessorConfig.model_validate_json(original.model_dump_json(by_alias=True)) == original


@pytest.mark.parametrize(
    ("target", "guarantee"),
    [
        pytest.param({"sql": {"statement": "SELECT 1"}}, Guarantee.TRANSACTIONAL, id="sql"),
        pytest.param({"python": {"module": "orders"}}, Guarantee.TRANSACTIONAL, id="python"),
        pytest.param({"log": {}}, Guarantee.AT_LEAST_ONCE, id="log"),
        pytest.param(
            {"rabbitmq": {"connection": {"secretRef": {"name": "mq"}}}}, Guarantee.AT_LEAST_ONCE, id="rabbitmq"
        ),
        pytest.param(None, Guarantee.TRANSACTIONAL, id="a Spark application"),
    ],
)
def test_guarantee_defaults_to_the_strongest_the_target_has(
    target: dict[str, object] | None, guarantee: Guarantee
) -> None:
    assert config(target).guarantee is guarantee


@pytest.mark.parametrize(
    ("engine", "named", "cursor"),
    [
        pytest.param(Engine.SPARK, None, Cursor.TRANSACTION_ORDER, id="Spark has one"),
        pytest.param(Engine.WORKER, None, None, id="a worker's depends on what is stored"),
        pytest.param(Engine.WORKER, Cursor.TRANSACTION_ORDER, Cursor.TRANSACTION_ORDER, id="as named"),
    ],
)
def test_the_engine_decides_what_an_unnamed_cursor_is(
    engine: Engine, named: Cursor | None, cursor: Cursor | None
) -> None:
    source = SOURCE.model_copy(update={"cursor": named})
    made = ProcessorConfig(resource=RESOURCE, generation=1, processor_id="orders", engine=engine, source=source)
    assert made.source.cursor is cursor


def test_unknown_fields_are_refused_with_their_name() -> None:
    with pytest.raises(ValidationError, match="tabel"):
        Source.model_validate({"connection": {"secretRef": {"name": "db"}}, "tabel": {}})


def test_report_survives_the_way_through_json_and_ignores_fields_of_a_newer_worker() -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    conflict = Conflict(id=7, code=2, expected="1:2", stored="1:9", pod="orders-a", time=now, needs_person=True)
    report = Report(
        processor_id="orders",
        resource=RESOURCE,
        generation=3,
        pod="orders-a",
        pod_uid="p-1",
        instance="i-1",
        time=now,
        state=WorkerState.BLOCKED,
        reason=Reason.CHECKPOINT_AHEAD,
        conflicts=ConflictSummary(count=1, by_code={"2": 1}, last=conflict, open=conflict),
    )
    newer = report.model_dump(mode="json", by_alias=True) | {"somethingNew": 1}
    assert Report.model_validate(newer) == report


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("15s", 15), ("1m30s", 90), ("1.5h", 5400), ("0s", 0)],
)
def test_durations_are_read_as_kubernetes_writes_them(text: str, seconds: float) -> None:
    assert parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "15", "s", "15 s", "1d", "-1s", "1s2"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="15s"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["500ms", "15s", "90s"])
def test_durations_are_written_as_they_are_read(text: str) -> None:
    assert format_duration(parse_duration(text)) == text


@pytest.mark.parametrize(("text", "value"), [("1Mi", 1 << 20), ("16Mi", 16 << 20), ("999Mi", 999 << 20)])
def test_bytes_are_read_and_written_as_kubernetes_writes_them(text, value):
    assert parse_bytes(text) == value
    assert format_bytes(value) == text


@pytest.mark.parametrize("text", ["", "Mi", "16", "16M", "1.5Mi", "-1Mi", "1Gi", "16Mi "])
def test_what_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="write for example 16Mi"):
        parse_bytes(text)
