"""A worker process as its operator asks it, and as others do. It needs no database to answer."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp

from outbox_core.report import Intent
from outbox_operator.api.keys import Keys
from outbox_operator.decision.reachability import Cause, Unreachable
from outbox_operator.reconcile.reports import Question, fetch_reports
from tests.support.servers.postgres import free_port, wait_until
from tests.support.worker import SQL_TARGET, build_config

if TYPE_CHECKING:
    from tests.support.worker import Worker, Workers

KEYS = Keys(b"installation")
KEY = KEYS.of("uid-orders")
TOKEN = "for Prometheus"
GUARDED = ["/status", "/metrics"]


def start(workers: Workers, key: bytes | None, **environment: str) -> Worker:
    """Start a worker with a key, or without one; its database cannot be reached."""
    home = workers.prepare(build_config(None, SQL_TARGET), f"postgresql://nobody@127.0.0.1:{free_port()}/none")
    file = home / "key"
    if key is not None:
        file.write_bytes(key)
    hashed = hashlib.sha256(TOKEN.encode()).hexdigest()
    worker = workers.launch(
        home, "--key", str(file), environment={"OUTBOX_METRICS_TOKEN_SHA256": hashed, **environment}
    )
    wait_until(lambda: answers(worker), "the worker answers")
    return worker


def answers(worker: Worker) -> bool:
    try:
        return worker.get("/livez")[0] == 200
    except OSError:
        return False


def pod_uid(worker: Worker) -> str:
    return f"uid-{worker.directory.name}"


async def call(worker: Worker, method: str, path: str, **options: Any) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, f"http://127.0.0.1:{worker.port}{path}", **options) as answer,
    ):
        return answer.status


async def test_the_operator_and_the_worker_know_each_other(workers: Workers):
    worker = start(workers, KEY)
    async with aiohttp.ClientSession() as session:
        place = f"http://127.0.0.1:{worker.port}"
        answer = await fetch_reports(session, place, Question("GET", "/status", pod_uid(worker), KEY))
        assert isinstance(answer, list)
        assert [report.pod_uid for report in answer] == [pod_uid(worker)]
        other = KEYS.of("uid-of-another-resource")
        refused = await fetch_reports(session, place, Question("GET", "/status", pod_uid(worker), other))
        assert refused == Unreachable(Cause.OTHER_KEY, "it answers 401")
        said = json.dumps({"intent": Intent.KEEP_CLAIM}).encode()
        asked = Question("POST", "/intent", pod_uid(worker), KEY, said)
        assert await call(worker, "POST", "/intent", data=said, headers=asked.headers) == 200
        changed = said.replace(b"KeepClaim", b"ReleaseClaim")
        assert await call(worker, "POST", "/intent", data=changed, headers=asked.headers) == 401


async def test_nobody_else_is_answered_and_probes_are(workers: Workers):
    worker = start(workers, KEY)
    for path in GUARDED:
        assert await call(worker, "GET", path) == 401
        assert await call(worker, "GET", f"{path}?a=b") == 401
    assert await call(worker, "POST", "/intent", data=b'{"intent": "ReleaseClaim"}') == 401
    assert await call(worker, "GET", "/livez") == 200
    assert await call(worker, "GET", "/readyz") == 503


async def test_a_question_fits_one_pod_one_path_and_one_method(workers: Workers):
    worker = start(workers, KEY)
    asked = Question("GET", "/status", pod_uid(worker), KEY)
    assert await call(worker, "GET", "/status", headers=asked.headers) == 200
    assert await call(worker, "GET", "/metrics", headers=asked.headers) == 401
    assert await call(worker, "POST", "/intent", data=b'{"intent": "KeepClaim"}', headers=asked.headers) == 401
    elsewhere = Question("GET", "/status", "uid-of-another-pod", KEY)
    assert await call(worker, "GET", "/status", headers=elsewhere.headers) == 401


async def test_prometheus_reads_metrics_with_its_token_and_nothing_else(workers: Workers):
    worker = start(workers, KEY)
    token = {"Authorization": f"Bearer {TOKEN}"}
    assert await call(worker, "GET", "/metrics", headers=token) == 200
    assert await call(worker, "GET", "/status", headers=token) == 401
    assert await call(worker, "GET", "/metrics", headers={"Authorization": "Bearer other"}) == 401
    assert await call(worker, "GET", "/metrics", headers={"Authorization": TOKEN}) == 401
    question = Question("GET", "/metrics", pod_uid(worker), KEY)
    assert await call(worker, "GET", "/metrics", headers=question.headers) == 200


async def test_a_pod_without_a_key_answers_without_a_signature_and_the_operator_does_not_believe_it(workers: Workers):
    worker = start(workers, None)
    async with aiohttp.ClientSession() as session:
        answer = await fetch_reports(
            session, f"http://127.0.0.1:{worker.port}", Question("GET", "/status", pod_uid(worker), KEY)
        )
    assert answer == Unreachable(Cause.OTHER_KEY, "it does not sign its answers")
    assert await call(worker, "POST", "/intent", data=b'{"intent": "KeepClaim"}') == 200


async def test_an_empty_key_starts_nothing(workers: Workers):
    home = workers.prepare(build_config(None, SQL_TARGET), "postgresql://nobody@127.0.0.1:1/none")
    (home / "key").touch()
    worker = workers.launch(home, "--key", str(home / "key"))
    assert worker.process.wait(30) == 12
    assert "is empty: delete its Secret" in (home / "termination-log").read_text()
