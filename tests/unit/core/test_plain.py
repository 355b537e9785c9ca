"""Errors of libraries in sentences: what is wrong, where, and what to write."""

from __future__ import annotations

import argparse

import pytest
from pydantic import ValidationError

from outbox_core import plain
from outbox_core.progress.checkpoint import MAX_POSITION, Checkpoint, parse_checkpoint
from outbox_operator.api.resources import ProcessorSpec

SOURCE = {"connection": {"secretRef": {"name": "db"}}}


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({}, "spec.source: is missing; set it"),
        ({"speed": 1}, "spec.speed: this version has no such field; correct its name or remove it"),
        ({"engine": "Flink"}, "spec.engine: must be 'Worker' or 'Spark', not \"Flink\""),
        ({"suspend": "maybe"}, 'spec.suspend: must be true or false, not "maybe"'),
        ({"delivery": {"batchSize": "x"}}, 'spec.delivery.batchSize: must be a whole number, not "x"'),
        ({"delivery": {"leaseDuration": "soon"}}, "'soon' is not a duration; write for example 500ms, 15s or 1m30s"),
        ({"delivery": {"retry": {"jitter": 3}}}, "jitter: should be less than or equal to 1, not 3"),
        ({"source": 5}, "spec.source: must be an object with fields, not 5"),
        ({"source": SOURCE | {"publications": "a"}}, 'spec.source.publications: must be a list, not "a"'),
        ({"startFrom": {"timestamp": "now"}}, 'must be a time such as 2026-01-01T00:00:00Z, not "now"'),
        ({"worker": {"image": ""}}, 'spec.worker.image: should have at least 1 character, not ""'),
        (
            {"source": {"connection": {"secretRef": {"name": "D"}}}},
            'spec.source.connection.secretRef.name: "D" does not match ^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$',
        ),
    ],
)
def test_a_fault_of_pydantic_becomes_a_sentence(spec, said):
    with pytest.raises(ValidationError) as refusal:
        ProcessorSpec.model_validate({"source": SOURCE} | spec if spec else spec)
    assert said in plain.plain_faults(refusal.value.errors(), "spec")


def test_no_more_than_five_faults_are_named():
    with pytest.raises(ValidationError) as refusal:
        ProcessorSpec.model_validate({"source": SOURCE} | {f"field{number}": 1 for number in range(9)})
    assert plain.plain_faults(refusal.value.errors()).count("no such field") == plain.AT_MOST


def test_what_is_not_json_is_said():
    with pytest.raises(ValidationError) as refusal:
        ProcessorSpec.model_validate_json("{")
    assert plain.plain_faults(refusal.value.errors()).startswith("the document: is not JSON: EOF")


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (plain.whole_number, "ten", "'ten' is not a whole number; write for example 100"),
        (plain.natural_number, "-1", "-1 is below 0; write 0 or more"),
        (plain.natural_number, "1.5", "'1.5' is not a whole number"),
        (plain.number_of_seconds, "nan", "'nan' is not a number of seconds; write for example 60 or 0.5"),
        (plain.number_of_seconds, "inf", "'inf' is not a number of seconds"),
        (plain.number_of_seconds, "-2", "-2 is below 0; write 0 or more seconds"),
        (plain.number_each_second, "0", "0 is not above 0; write for example 100 or 0.5"),
        (plain.number_each_second, "fast", "'fast' is not a number of messages a second"),
        (plain.port_number, "70000", "70000 is not a port; write 0 to 65535"),
    ],
)
def test_an_option_that_makes_no_sense_is_answered_in_a_sentence(read, text, said):
    with pytest.raises(argparse.ArgumentTypeError) as refusal:
        read(text)
    assert said in str(refusal.value)


def test_options_are_read():
    assert (plain.whole_number("-3"), plain.natural_number("0"), plain.port_number("0")) == (-3, 0, 0)
    assert (plain.number_of_seconds("0.5"), plain.number_each_second("2")) == (0.5, 2.0)


def test_the_last_position_of_a_transaction_id_is_written_as_its_end_and_read_again():
    checkpoint = Checkpoint(5929, MAX_POSITION)
    assert plain.plain_checkpoints(f"at {checkpoint}, then 815:42") == "at 5929:end, then 815:42"
    assert parse_checkpoint("5929:end") == checkpoint


@pytest.mark.parametrize(("number", "said"), [(0, "0 pods"), (1, "1 pod"), (2, "2 pods")])
def test_what_is_counted_is_singular_for_one_alone(number: int, said: str):
    assert plain.plain_count(number, "pod") == said


def test_a_plural_of_its_own():
    assert [plain.plain_count(number, "pod is", "pods are") for number in (1, 2)] == ["1 pod is", "2 pods are"]
