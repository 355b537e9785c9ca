"""What an error of Spark's means."""

from __future__ import annotations

import pytest

from outbox_core.errors import ConfigurationError, HandlerError, PermanentError, TransientError
from outbox_core.report import Reason
from outbox_spark.failure import explain_failure

IN_A_TASK = """An exception was thrown from the Python worker. Please see the stack trace below.
Traceback (most recent call last):
  File "/app/orders.py", line 7, in parse
    return int(text)
ValueError: invalid literal for int()
"""


class SparkFailureError(Exception):
    """As pyspark's own: its module is what tells it from the user's."""


SparkFailureError.__module__ = "pyspark.errors"


@pytest.mark.parametrize(
    ("error", "kind", "reason", "says"),
    [
        pytest.param(
            KeyError("total"), HandlerError, Reason.HANDLER_FAILED, "orders.handle failed: KeyError: 'total'",
            id="on the driver",
        ),
        pytest.param(
            SparkFailureError(IN_A_TASK), HandlerError, Reason.HANDLER_FAILED, "ValueError: invalid literal",
            id="in a task",
        ),
        pytest.param(
            SparkFailureError("outbox_core.errors.TransientError: the server is away\n"), TransientError,
            Reason.DATABASE_UNAVAILABLE, "the server is away", id="the database, seen by an executor",
        ),
        pytest.param(
            SparkFailureError("outbox_core.errors.ConfigurationError: no such column\n"), ConfigurationError,
            Reason.INVALID_CONFIGURATION, "no such column", id="the source, seen by an executor",
        ),
        pytest.param(
            SparkFailureError("Job aborted: ExecutorLostFailure (executor 1 exited)"), TransientError,
            Reason.TARGET_UNAVAILABLE, "executors were lost", id="executors lost",
        ),
        pytest.param(
            SparkFailureError("[STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE] Provided key schema does not match"),
            PermanentError, Reason.QUERY_STATE_MISMATCH, "rewind the checkpoint", id="state of another application",
        ),
        pytest.param(
            TransientError("said already", reason=Reason.LEASE_LOST), TransientError, Reason.LEASE_LOST, "said already",
            id="ours",
        ),
    ],
)  # fmt: skip
def test_kinds(error, kind, reason, says):
    explained = explain_failure(error, "orders.handle")
    assert type(explained) is kind
    assert explained.reason is reason
    assert says in str(explained)
