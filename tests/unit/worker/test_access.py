"""Who may ask a worker what."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from outbox_core.errors import ConfigurationError
from outbox_core.proof import sign_question
from outbox_worker.observe.health import Access, Question, read_access
from outbox_worker.settings import read_settings

KEY = b"key"
KEYED = Access(KEY, "uid", hashlib.sha256(b"token").hexdigest())
KEYLESS = Access(b"", "uid", "")
STATUS = Question(
    "GET", "/status", "10.0.0.9", nonce="n", signature=sign_question(KEY, "uid", "n", "GET", "/status", b"")
)
METRICS = Question("GET", "/metrics", "10.0.0.9", token="token")

ADMITTED = [
    pytest.param(KEYED, Question("GET", "/livez", "10.0.0.9"), True, id="the kubelet"),
    pytest.param(KEYED, Question("GET", "/readyz", "10.0.0.9"), True, id="the kubelet again"),
    pytest.param(KEYED, STATUS, True, id="the operator"),
    pytest.param(KEYED, replace(STATUS, path="/metrics"), False, id="its signature for something else"),
    pytest.param(KEYED, replace(STATUS, body=b"{}"), False, id="its signature with a body"),
    pytest.param(replace(KEYED, pod_uid="other"), STATUS, False, id="its signature for another pod"),
    pytest.param(KEYED, replace(STATUS, nonce=""), False, id="no nonce"),
    pytest.param(KEYED, replace(STATUS, client="127.0.0.1", signature=""), False, id="this machine, with a key"),
    pytest.param(KEYED, METRICS, True, id="Prometheus"),
    pytest.param(KEYED, replace(METRICS, path="/status"), False, id="Prometheus asks for status"),
    pytest.param(KEYED, replace(METRICS, token="other"), False, id="another token"),
    pytest.param(KEYED, replace(METRICS, token=""), False, id="no token"),
    pytest.param(replace(KEYED, metrics_hash=""), METRICS, False, id="no token is known"),
    pytest.param(replace(KEYED, metrics_hash=""), replace(METRICS, token=""), False, id="neither known nor shown"),
    pytest.param(KEYLESS, Question("GET", "/status", "127.0.0.1"), True, id="without a key: this machine"),
    pytest.param(KEYLESS, Question("GET", "/status", "::1"), True, id="the same by IPv6"),
    pytest.param(KEYLESS, Question("POST", "/intent", "::ffff:127.0.0.1"), True, id="the same by both"),
    pytest.param(KEYLESS, Question("GET", "/status", "10.0.0.9"), False, id="without a key: another machine"),
    pytest.param(KEYLESS, Question("GET", "/metrics", "::ffff:10.0.0.9"), False, id="another machine by both"),
    pytest.param(KEYLESS, Question("GET", "/status", "fe80::1%eth0"), False, id="a neighbour"),
]  # fmt: skip


@pytest.mark.parametrize(("access", "question", "admitted"), ADMITTED)
def test_who_may_ask(access: Access, question: Question, *, admitted: bool):
    assert access.admits(question) is admitted


def test_only_the_answer_to_a_signed_question_is_signed():
    assert KEYED.sign(STATUS, b"text") is not None
    assert KEYED.sign(METRICS, b"text") is None
    assert KEYLESS.sign(Question("GET", "/status", "127.0.0.1", nonce="n"), b"text") is None


def test_a_key_that_cannot_be_read_opens_nothing(tmp_path):
    path = tmp_path / "key"
    settings = read_settings(["--key", str(path)], {"POD_UID": "uid", "OUTBOX_METRICS_TOKEN_SHA256": "5e88"})
    assert read_access(settings) == Access(b"", "uid", "5e88")
    path.write_bytes(b"secret\n")
    assert read_access(settings).key == b"secret"
    path.write_bytes(b"\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        read_access(settings)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigurationError, match="cannot read"):
        read_access(settings)


def test_no_text_of_it_shows_a_secret():
    assert "key" not in repr(replace(KEYED, pod_uid="")).replace("metrics_hash", "")
    assert "token" not in repr(METRICS)
