"""What is found wrong with a Spark processor before Spark is started."""

from __future__ import annotations

import pytest

from outbox_core.config import ProcessorConfig
from outbox_core.errors import ConfigurationError
from outbox_spark.session import SessionStarter
from outbox_spark.streaming.pipeline import SparkPipeline
from outbox_worker.postgres.key import ProcessorKey


def test_a_target_that_is_no_single_statement_is_refused(tmp_path):
    config = ProcessorConfig.model_validate(
        {
            "resource": {"cluster": "c", "namespace": "n", "name": "orders", "uid": "u"},
            "generation": 1,
            "processorId": "orders",
            "engine": "Spark",
            "source": {"connection": {"secretRef": {"name": "db"}}},
            "target": {"sql": {"statement": "INSERT INTO a SELECT 1; INSERT INTO b SELECT 1"}},
        }
    )
    sessions = SessionStarter(lambda: pytest.fail("Spark is not needed"))
    key = ProcessorKey("outbox", "orders")
    pipeline = SparkPipeline(config, key, source=tmp_path, handler=tmp_path, sessions=sessions)
    with pytest.raises(ConfigurationError, match=r"target\.sql\.statement cannot be used: it holds 2 statements"):
        pipeline.check()
