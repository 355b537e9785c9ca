"""A pod answers what its image makes of it: the operator goes on with every answer, and knows whose answer it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
from aiohttp import web

from outbox_core.proof import SIGNATURE_HEADER, sign_answer
from outbox_core.report import (
    BlockedKey,
    FailureSummary,
    HighWaterMark,
    LeaseView,
    RebuildState,
    RebuildView,
    Report,
    Unfinished,
)
from outbox_operator.api.keys import Keys
from outbox_operator.decision.reachability import Cause, Unreachable
from outbox_operator.reconcile.reports import LONGEST_REPORT, Question, fetch_reports, news_in
from tests.unit.operator.building import NOW, build_report

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REPORT = build_report().model_dump_json(by_alias=True)
ANSWERS = {
    "report": (200, REPORT.encode()),
    "bytes": (200, b"{\xff\xfe\xfd"),
    "json": (200, b'{"state": "Active"}'),
    "deep": (200, b"[" * 100_000),
    "refusal": (503, REPORT.encode()),
    "elsewhere": (307, REPORT.encode()),
    "closed": (401, b""),
}
KEY = Keys(b"installation").of("uid-1")
POD = "pod-uid"
SIGNING = {
    "signed": KEY,
    "forged": Keys(b"installation").of("uid-2"),
}
"""Paths whose answers are signed, and with what."""


@pytest.fixture
async def pod() -> AsyncIterator[str]:
    """A process that answers each path in its own way; gives its address."""

    async def answer(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name in SIGNING:
            question = request.headers[SIGNATURE_HEADER]
            headers = {SIGNATURE_HEADER: sign_answer(SIGNING[name], question, REPORT.encode())}
            return web.Response(body=REPORT.encode(), headers=headers)
        if name == "replayed":
            headers = {SIGNATURE_HEADER: sign_answer(KEY, "of another question", REPORT.encode())}
            return web.Response(body=REPORT.encode(), headers=headers)
        if name == "changed":
            question = request.headers[SIGNATURE_HEADER]
            headers = {SIGNATURE_HEADER: sign_answer(KEY, question, REPORT.encode())}
            return web.Response(body=REPORT.replace("Active", "ClaimRefused").encode(), headers=headers)
        if name != "flood":
            status, body = ANSWERS[name]
            return web.Response(status=status, body=body, headers={"Location": "report"})
        flood = web.StreamResponse()
        await flood.prepare(request)
        while True:
            await flood.write(b" " * 65536)

    app = web.Application()
    app.add_routes([web.get("/{name}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}"
    await runner.cleanup()


async def heard_at(pod: str, path: str) -> Report | Unreachable:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        found = await fetch_reports(session, pod, Question("GET", f"/{path}", POD, KEY))
        return found if isinstance(found, Unreachable) else found[0]


@pytest.mark.parametrize("path", ["bytes", "json", "deep", "flood"])
async def test_only_a_report_is_taken(pod: str, path: str):
    assert await heard_at(pod, path) == Unreachable(Cause.NO_WORKER, "its answer is no report")
    assert len(REPORT) < LONGEST_REPORT / 10


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("refusal", Unreachable(Cause.NO_WORKER, "it answers 503")),
        ("elsewhere", Unreachable(Cause.NO_WORKER, "it answers 307")),
        ("closed", Unreachable(Cause.OTHER_KEY, "it answers 401")),
    ],
)
async def test_only_the_pods_own_good_answer_is_taken(pod: str, path: str, why: Unreachable):
    assert await heard_at(pod, path) == why


@pytest.mark.parametrize("path", ["forged", "replayed", "changed"])
async def test_an_answer_that_is_signed_otherwise_is_not_taken(pod: str, path: str):
    assert await heard_at(pod, path) == Unreachable(Cause.OTHER_KEY, "its answer is signed with that one")


async def test_an_answer_without_a_signature_is_not_taken(pod: str):
    assert await heard_at(pod, "report") == Unreachable(Cause.OTHER_KEY, "it does not sign its answers")


async def test_a_signed_report_is_taken(pod: str):
    assert await heard_at(pod, "signed") == build_report()


WAITS = BlockedKey(key="7", message_id="m", attempts=1, error_class="ValueError", next_attempt_at=NOW)
NEWS = [
    pytest.param({"failures": FailureSummary()}, id="failures were looked at"),
    pytest.param({"failures": FailureSummary(dead_letters=1)}, id="a message became a dead letter"),
    pytest.param({"failures": FailureSummary(held=1, blocked_keys=[WAITS])}, id="a key waits"),
    pytest.param({"circuit": "Open"}, id="the circuit breaker opened"),
    pytest.param({"leases": [LeaseView(partition=1, epoch=2, pod="orders-1")]}, id="a partition has an owner"),
    pytest.param({"unfinished": Unfinished(consumers=2)}, id="a consumer came"),
    pytest.param({"high_water_mark": HighWaterMark(transaction_id="815", age_seconds=60)}, id="the bound stands still"),
    pytest.param({"high_water_mark": HighWaterMark(transaction_id="815", age_seconds=0)}, id="the bound was looked at"),
    pytest.param({"rebuild": RebuildView(of="v1", state=RebuildState.SWAPPED)}, id="a rebuild was swapped"),
]


@pytest.mark.parametrize("fields", NEWS)
def test_what_a_person_waits_for_is_news(fields: dict[str, Any]) -> None:
    assert news_in(build_report(**fields)) != news_in(build_report())


def test_another_attempt_of_the_same_message_is_none() -> None:
    later = WAITS.model_copy(update={"attempts": 2, "next_attempt_at": NOW.replace(year=2027)})
    one, other = (build_report(failures=FailureSummary(held=1, blocked_keys=[key])) for key in (WAITS, later))
    assert news_in(one) == news_in(other)
    person = WAITS.model_copy(update={"next_attempt_at": None})
    assert news_in(one) != news_in(build_report(failures=FailureSummary(held=1, blocked_keys=[person])))


def test_who_holds_the_bound_is_news_when_the_next_one_does() -> None:
    one, other = (
        build_report(high_water_mark=HighWaterMark(transaction_id=held, age_seconds=60)) for held in ("815", "816")
    )
    assert news_in(one) != news_in(other), "the condition would name one that is gone, until the next look"
    one, other = (
        build_report(high_water_mark=HighWaterMark(transaction_id=held, age_seconds=0)) for held in ("815", "816")
    )
    assert news_in(one) == news_in(other), "a bound that moves is none"
