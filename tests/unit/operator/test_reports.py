"""What a pod answers is the user's image's to say: whatever it is, the operator goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from outbox_operator.reports import LONGEST_REPORT, fetch_report
from tests.unit.operator.building import build_report

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

REPORT = build_report().model_dump_json(by_alias=True)
ANSWERS = {
    "report": (200, REPORT.encode()),
    "bytes": (200, b"{\xff\xfe\xfd"),
    "json": (200, b'{"state": "Active"}'),
    "refusal": (503, REPORT.encode()),
    "elsewhere": (307, REPORT.encode()),
}


@pytest.fixture
async def pod() -> AsyncIterator[str]:
    """A process that answers each path in its own way; gives its address."""

    async def answer(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
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


@pytest.mark.parametrize(
    ("path", "understood"),
    [
        ("report", True),
        ("bytes", False),
        ("json", False),
        ("refusal", False),
        ("elsewhere", False),
        ("flood", False),
    ],
)
async def test_only_a_report_is_taken_and_only_from_the_pod_itself(pod: str, path: str, *, understood: bool):
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        report = await fetch_report(session, f"{pod}/{path}")
    assert (report is not None) is understood
    assert len(REPORT) < LONGEST_REPORT / 10
