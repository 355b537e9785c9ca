"""The registry of targets: what follows from a line of it, and that no other module has to name the target."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from outbox_core.config import ProcessorConfig
from outbox_core.spec import TARGETS, Engine, Guarantee, Target

ROOT = Path(__file__).resolve().parents[3]
SMALLEST: dict[str, dict[str, Any]] = {
    "sql": {"statement": "SELECT"},
    "python": {"module": "orders"},
    "rabbitmq": {"connection": {"secretRef": {"name": "broker"}}},
    "kafka": {"connection": {"secretRef": {"name": "broker"}}, "topic": "orders"},
    "rabbitmqStream": {"connection": {"secretRef": {"name": "broker"}}, "stream": "orders"},
    "http": {"url": "https://shop.test/events"},
    "log": {},
    "parquet": {"path": "/data"},
}
OTHER = {"connection": {"secretRef": {"name": "other"}}}


def make(name, **fields):
    return Target.model_validate({name: SMALLEST[name] | fields})


def test_every_target_is_tried_here():
    assert [kind.name for kind in TARGETS] == list(SMALLEST)


@pytest.mark.parametrize("kind", TARGETS, ids=lambda kind: kind.name)
class TestEachTarget:
    def test_it_is_found_by_its_line(self, kind):
        made = make(kind.name)
        assert made.kind is kind
        assert made.chosen is getattr(made, kind.attribute)

    def test_its_default_guarantee(self, kind):
        engine = kind.engines[0]
        config = ProcessorConfig.model_validate(
            {
                "resource": {"cluster": "c", "namespace": "n", "name": "o", "uid": "u"},
                "generation": 1,
                "processorId": "o",
                "engine": engine,
                "source": OTHER,
                "target": {kind.name: SMALLEST[kind.name]},
            }
        )
        expected = Guarantee.TRANSACTIONAL if kind.transactional else Guarantee.AT_LEAST_ONCE
        assert config.guarantee is expected

    def test_a_connection_is_mounted_and_of_a_transactional_target_another_database(self, kind):
        if not kind.connects:
            assert make(kind.name).connection is None
            return
        made = make(kind.name, **OTHER)
        assert made.connection is not None
        assert made.connection.secret_ref.name == "other"
        assert made.database is (made.connection if kind.transactional else None)

    def test_the_worker_builds_it_from_the_module_of_its_name(self, kind):
        if Engine.WORKER in kind.engines:
            assert callable(importlib.import_module(f"outbox_worker.targets.{kind.attribute}").build)


def test_exactly_one_target():
    for wrong in ({}, {"log": {}, "sql": SMALLEST["sql"]}):
        with pytest.raises(ValidationError, match="set exactly one target: sql, python"):
            Target.model_validate(wrong)


def test_the_operator_names_no_target_outside_the_database():
    outside = "|".join(kind.name for kind in TARGETS if not kind.transactional)
    named = re.compile(rf"\btarget\.({outside})\b|({outside})target|rabbitmq|kafka", re.IGNORECASE)
    sources = (ROOT / "operator" / "src").rglob("*.py")
    assert [str(path) for path in sources if named.search(path.read_text())] == []
