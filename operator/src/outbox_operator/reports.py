"""Asks the workers' pods what they say (GET /status) and tells them why they are taken away (POST /intent).

The only channel to the data plane. A pod that does not answer twice in a row, or cannot be asked any more, is
unreachable, which is not the same as gone: its last report stays, and nothing is scaled down for it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from outbox_core.report import STATUS_PORT, Intent, Report
from outbox_operator.observed import RUNNERS
from outbox_operator.podstate import parse_report, role_of
from outbox_operator.store import key_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox_operator.store import Body, Store
    from outbox_operator.workqueue import Key

PERIOD: Final = 2.0
TIMEOUT: Final = aiohttp.ClientTimeout(total=1.5, connect=1.0)
INTENT_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0, connect=1.0)
PARALLEL: Final = 32
LONGEST_REPORT: Final = 256 * 1024
"""Bytes; a report has a few thousand."""
PATIENCE: Final = 2
"""Unanswered questions in a row before a pod counts as unreachable."""

FEW: Final = 10
"""Held messages that are counted at once; of more only that there are more, the number with the next look."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Heard:
    """What one pod said last."""

    report: Report | None = None
    missed: int = 0

    @property
    def reachable(self) -> bool:
        """Whether it still answers."""
        return self.report is not None and self.missed < PATIENCE


class Reporters:
    """The latest report of every pod, by pod uid; asks every PERIOD seconds."""

    def __init__(self, store: Store, notify: Callable[[Key], None]) -> None:
        """Ask the pods of `store`; `notify` hears of a resource whose workers say something new."""
        self._store = store
        self._notify = notify
        self._heard: dict[str, Heard] = {}
        self._slots = asyncio.Semaphore(PARALLEL)
        self.asked = asyncio.Event()
        """Every pod was asked once."""

    def heard(self, uid: str) -> Heard:
        """Look up what a pod said."""
        return self._heard.get(uid) or Heard()

    async def run(self) -> None:
        """Ask for ever."""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            while True:
                pods = [pod for pod in self._store.all_of("Pod") if _answers(pod) or _uid(pod) in self._heard]
                await asyncio.gather(*(self._ask(session, pod) for pod in pods))
                self.asked.set()
                present = {_uid(pod) for pod in self._store.all_of("Pod")}
                for uid in self._heard.keys() - present:
                    del self._heard[uid]
                await asyncio.sleep(PERIOD)

    async def _ask(self, session: aiohttp.ClientSession, pod: Body) -> None:
        entry = self._heard.setdefault(_uid(pod), Heard())
        before = (news_in(entry.report), entry.reachable)
        report = await self._fetch(session, pod) if _answers(pod) else None
        if report is None:
            entry.missed += 1
        else:
            entry.report, entry.missed = report, 0
        if (news_in(entry.report), entry.reachable) != before:
            self._notify(key_of(pod))

    async def _fetch(self, session: aiohttp.ClientSession, pod: Body) -> Report | None:
        try:
            async with self._slots:
                return await fetch_report(session, _url(pod, "status"))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


async def fetch_report(session: aiohttp.ClientSession, url: str) -> Report | None:
    """Ask one process; None when it answers something else.

    The image is the user's: an answer may be anything, of any length, and must not send us elsewhere.

    Raises:
        aiohttp.ClientError, TimeoutError, OSError: it does not answer.

    """
    async with session.get(url, allow_redirects=False) as answer:
        if answer.status != 200:
            return None
        text = await _read_some(answer.content)
    return parse_report(text.decode(errors="replace")) if len(text) <= LONGEST_REPORT else None


async def _read_some(content: aiohttp.StreamReader) -> bytes:
    """Read all, or a little more than a report may have."""
    text = b""
    async for chunk in content.iter_any():
        text += chunk
        if len(text) > LONGEST_REPORT:
            break
    return text


def _uid(pod: Body) -> str:
    uid: str = pod["metadata"]["uid"]
    return uid


def _answers(pod: Body) -> bool:
    status = pod.get("status") or {}
    return role_of(pod) in RUNNERS and status.get("phase") == "Running" and bool(status.get("podIP"))


def _url(pod: Body, path: str) -> str:
    ip = pod["status"]["podIP"]
    return f"http://{f'[{ip}]' if ':' in ip else ip}:{STATUS_PORT}/{path}"


def news_in(report: Report | None) -> Any:
    """What of a report is news at once; figures that always move wait for the next look."""
    if report is None:
        return None
    lease = report.lease
    return (
        report.instance,
        report.state,
        report.reason,
        report.message,
        report.claim_holder,
        (lease.held, lease.pod, lease.epoch) if lease is not None else None,
        report.division,
        report.conflicts.count,
        report.conflicts.strangers,
        report.conflicts.open,
        report.conflicts.last,
        _bound(report),
        _trouble(report),
        frozenset((held.partition, held.pod) for held in report.leases),
        report.unfinished.consumers if report.unfinished is not None else None,
        report.rebuild.state if report.rebuild is not None else None,
    )


def _bound(report: Report) -> str | None:
    """Whether it was looked at, and who holds it while it stands still."""
    if report.bound is None:
        return None
    return report.bound.transaction_id if report.bound.stalled else ""


def _trouble(report: Report) -> Any:
    """What failing messages did, without what changes with every attempt."""
    seen = report.failures
    keys = [(each.key, each.message_id, each.error_class, each.next_attempt_at is None) for each in seen.blocked_keys]
    return report.circuit, seen.dead_letters, min(seen.held, FEW), keys


async def tell_intent(pods: list[Body], intent: Intent) -> None:
    """Tell pods why they are taken away; one that cannot hear vacates its claim, and a grace outlasts that."""

    async def tell(session: aiohttp.ClientSession, pod: Body) -> None:
        try:
            async with session.post(_url(pod, "intent"), json={"intent": intent}, allow_redirects=False) as answer:
                if answer.status != 200:
                    log.warning("intent refused", extra={"pod": pod["metadata"]["name"], "status": answer.status})
        except (aiohttp.ClientError, TimeoutError, OSError) as err:
            log.info("intent not heard", extra={"pod": pod["metadata"]["name"], "error": type(err).__name__})

    async with aiohttp.ClientSession(timeout=INTENT_TIMEOUT) as session:
        await asyncio.gather(*(tell(session, pod) for pod in pods if _answers(pod)))
