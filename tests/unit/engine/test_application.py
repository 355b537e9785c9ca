"""The user's module: what is missing or wrong, said so that it can be mended, and mended without a restart."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason
from outbox_spark.application import load_application
from outbox_worker.handlers.handler import read_signature

if TYPE_CHECKING:
    from collections.abc import Iterator

PARQUET = {"parquet": {"path": "/data"}}


def config(module: str | None = "billing_app", target: dict[str, Any] | None = None) -> ProcessorConfig:
    return ProcessorConfig.model_validate(
        {
            "resource": {"cluster": "c", "namespace": "n", "name": "orders", "uid": "u"},
            "generation": 1,
            "processorId": "orders",
            "engine": "Spark",
            "source": {"connection": {"secretRef": {"name": "db"}}},
            "target": target,
            "spark": {"application": {"module": module} if module else None},
        }
    )


@pytest.fixture(autouse=True)
def clean_imports() -> Iterator[None]:
    """As the driver's process is: nothing imported yet, and no bytecode that hides an edit of the same second."""
    path, known, writes = list(sys.path), set(sys.modules), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    yield
    sys.path[:], sys.dont_write_bytecode = path, writes
    for name in set(sys.modules) - known:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("text", "target", "reason", "says"),
    [
        pytest.param(
            None, None, Reason.APPLICATION_MISSING, r"put a key billing_app\.py into the ConfigMap", id="no module"
        ),
        pytest.param("x = 1", None, Reason.APPLICATION_MISSING, "neither transform", id="no function"),
        pytest.param(
            "import no_such_thing", None, Reason.HANDLER_INVALID, "no_such_thing", id="an import of its own fails"
        ),
        pytest.param("1 / 0", None, Reason.HANDLER_INVALID, "ZeroDivisionError", id="it raises when imported"),
        pytest.param("def broken(:", None, Reason.HANDLER_INVALID, "SyntaxError", id="it is not Python"),
        pytest.param(
            "def transform(m): return m", None, Reason.HANDLER_INVALID, "no target takes its result", id="no target"
        ),
        pytest.param(
            "def handle(m, e): pass", PARQUET, Reason.HANDLER_INVALID, "leave out spec.target", id="two targets"
        ),
        pytest.param(
            "def handle(m, e): pass\ndef transform(m): pass",
            None,
            Reason.HANDLER_INVALID,
            "keep one",
            id="two functions",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path, text, target, reason, says):
    if text is not None:
        (tmp_path / "billing_app.py").write_text(text)
    with pytest.raises(ConfigurationError, match=says) as caught:
        load_application(config(target=target), tmp_path)
    assert caught.value.reason is reason


def test_a_module_that_is_mended_is_seen(tmp_path):
    before = read_signature(tmp_path)
    with pytest.raises(ConfigurationError):
        load_application(config(), tmp_path)
    file = tmp_path / "billing_app.py"
    file.write_text("from billing_parts import handle")
    (tmp_path / "billing_parts.py").write_text("def handle(messages, effects): return 'mended'")
    assert read_signature(tmp_path) != before
    found = load_application(config(), tmp_path)
    assert found.handle is not None
    assert found.handle(None, None) == "mended"
    part = tmp_path / "billing_parts.py"
    part.write_text("def handle(messages, effects): return 'again'")
    os.utime(part, (1, 1))
    again = load_application(config(), tmp_path)
    assert again.handle is not None
    assert again.handle(None, None) == "again"


def test_a_target_alone_needs_no_application():
    found = load_application(config(module=None, target=PARQUET), Path("/nowhere"))
    assert (found.transform, found.handle) == (None, None)
