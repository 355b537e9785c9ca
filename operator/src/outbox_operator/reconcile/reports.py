"""Asks the workers' pods what they say (GET /status) and tells them why they are taken away (POST /intent).

The only channel to the data plane. Questions and answers are signed with the resource's key (docs/adr/0015). A pod that
does not answer twice in a row, or cannot be asked any more, is unreachable, which is not the same as gone: its last
report stays, and nothing is scaled down for it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import secrets
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import aiohttp

from outbox_core.proof import NONCE_HEADER, SIGNATURE_HEADER, is_same, sign_answer, sign_question
from outbox_operator.api.naming import shared_id, shared_name
from outbox_operator.api.observed import RUNNERS
from outbox_operator.decision.reachability import Cause, Unreachable, address_of, describe_unreachable, is_overdue
from outbox_operator.reconcile.podstate import parse_reports, role_of
from outbox_operator.rendering.shared import read_parts
from outbox_operator.watch.owner_references import is_own
from outbox_operator.watch.rate_limiter import RateLimiter
from outbox_operator.watch.store import Body, Store, is_shared, key_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from outbox_core.report import Intent, Report
    from outbox_operator.api.keys import Keys
    from outbox_operator.watch.workqueue import Key

PERIOD: Final = 2.0
TIMEOUT: Final = aiohttp.ClientTimeout(total=1.5, connect=1.0)
INTENT_TIMEOUT: Final = aiohttp.ClientTimeout(total=2.0, connect=1.0)
PARALLEL: Final = 32
LONGEST_REPORT: Final = 256 * 1024
"""Bytes; a report has a few thousand. A shared pod has one for each resource."""
PATIENCE: Final = 2
"""Unanswered questions in a row before a pod counts as unreachable."""

FIGURES_EVERY: Final = 10.0
"""Seconds within which status shows figures that move."""
FEW: Final = 10
"""Held messages that are counted at once; of more only that there are more, the number with the next look."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Heard:
    """What one pod said last."""

    reports: dict[str, Report] = field(default_factory=dict)
    """By the name of the resource."""
    missed: int = 0
    unreachable_message: str = ""
    """Why it is not heard, and what to do, once that is worth telling."""

    @property
    def reachable(self) -> bool:
        """Whether it still answers."""
        return bool(self.reports) and self.missed < PATIENCE


class Reporters:
    """The latest report of every pod, by pod uid; asks every PERIOD seconds."""

    def __init__(self, store: Store, keys: Keys, namespace: str, notify: Callable[[Key, float], None]) -> None:
        """Ask the pods of `store` from the operator's `namespace`.

        `notify` hears of a resource with news, and in how many seconds it may be woken.
        """
        self._store = store
        self._keys = keys
        self._namespace = namespace
        self._notify = notify
        self._heard: dict[str, Heard] = {}
        self._limiters: defaultdict[Key, RateLimiter] = defaultdict(RateLimiter)
        self._slots = asyncio.Semaphore(PARALLEL)
        self._slots_of_silent = asyncio.Semaphore(PARALLEL // 2)
        self._silent: set[str] = set()
        """Pods that are asked beside the rounds: they have not answered."""
        self.asked = asyncio.Event()
        """Every pod was asked once."""
        self._moved = time.monotonic()
        """When a question ended last, or there was none to ask."""

    @property
    def stuck_seconds(self) -> float:
        """For how long no question has ended, and no round."""
        return time.monotonic() - self._moved if self.asked.is_set() else 0.0

    def heard(self, pod: Body) -> Heard:
        """Look up what a pod of a resource said."""
        return self._heard.get(_uid(pod)) or Heard()

    async def run(self) -> None:
        """Ask every PERIOD seconds until cancelled."""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session, asyncio.TaskGroup() as group:
            while True:
                pods = [pod for pod in self._store.all_of("Pod") if _answers(pod) or _uid(pod) in self._heard]
                own = [pod for pod in pods if is_own(pod, self._store)]
                for pod in own:
                    if self.heard(pod).missed >= PATIENCE and _uid(pod) not in self._silent:
                        self._silent.add(_uid(pod))
                        group.create_task(self._ask_silent(session, pod))
                answering = [pod for pod in own if _uid(pod) not in self._silent]
                await asyncio.gather(*(self._try_asking(session, pod) for pod in answering))
                self.asked.set()
                self._forget()
                self._moved = time.monotonic()
                await asyncio.sleep(PERIOD)

    def _forget(self) -> None:
        """Drop what is known of pods and resources that are gone."""
        for uid in self._heard.keys() - {_uid(pod) for pod in self._store.all_of("Pod")}:
            del self._heard[uid]
        for key in [key for key in self._limiters if self._store.resource(key) is None]:
            del self._limiters[key]

    async def _ask_silent(self, session: aiohttp.ClientSession, pod: Body) -> None:
        """Ask a pod that has not answered, if it is still there; no round waits for its time limit."""
        async with self._slots_of_silent:
            known = self._store.get("Pod", key_of(pod)[0], pod["metadata"]["name"])
            if known is not None and _uid(known) == _uid(pod):
                await self._try_asking(session, known)
        self._silent.discard(_uid(pod))

    async def _try_asking(self, session: aiohttp.ClientSession, pod: Body) -> None:
        try:
            await self._ask(session, pod)
        except Exception:
            # A fault of ours about one pod must not keep all others from being heard.
            log.exception("asking a pod failed", extra={"pod": _full_name(pod)})
        self._moved = time.monotonic()

    async def _ask(self, session: aiohttp.ClientSession, pod: Body) -> None:
        entry = self._heard.setdefault(_uid(pod), Heard())
        before = replace(entry)
        answer = await self._fetch(session, pod) if _answers(pod) else None
        if isinstance(answer, list):
            entry.reports = (
                {each.resource.name: each for each in answer} if is_shared(pod) else {key_of(pod)[1]: answer[0]}
            )
            entry.missed, entry.unreachable_message = 0, ""
        else:
            entry.missed += 1
            entry.unreachable_message = self._describe_unreachable(pod, entry, answer)
            if entry.missed == PATIENCE:
                why = answer.words if answer is not None else ""
                log.info("a pod is not heard", extra={"pod": _full_name(pod), "why": why})
        everyone = (entry.reachable, entry.unreachable_message) != (before.reachable, before.unreachable_message)
        for name in resources_of(pod):
            about, was, now = (key_of(pod)[0], name), before.reports.get(name), entry.reports.get(name)
            if everyone or news_in(now) != news_in(was):
                self._notify(about, self._limiters[about].wait(time.monotonic()))
            elif figures_in(now) != figures_in(was):
                self._notify(about, FIGURES_EVERY)

    def _describe_unreachable(self, pod: Body, entry: Heard, unreachable: Unreachable | None) -> str:
        """Say why a pod is not heard; empty while it may only need a moment."""
        owner = self._find_owner(pod)
        if unreachable is None or owner is None:
            return ""
        # One that was heard before needs no time to start.
        told = entry.missed >= PATIENCE if entry.reports else is_overdue(pod, datetime.now(UTC))
        return describe_unreachable(unreachable, pod, self._namespace, self._keys.secret_name(*owner)) if told else ""

    def _find_owner(self, pod: Body) -> tuple[str, str] | None:
        """Find for whom a pod's key was made: its name, and what the key is derived of; None: it is gone."""
        if is_shared(pod):
            namespace, label = key_of(pod)
            return shared_name(label), shared_id(namespace, label)
        resource = self._store.resource(key_of(pod))
        return None if resource is None else (resource["metadata"]["name"], _uid(resource))

    async def _fetch(self, session: aiohttp.ClientSession, pod: Body) -> list[Report] | Unreachable | None:
        """Ask a pod; None: its resource is gone."""
        owner = self._find_owner(pod)
        if owner is None:
            return None
        question = Question("GET", "/status", _uid(pod), self._keys.of(owner[1]))
        try:
            async with self._slots:
                return await fetch_reports(session, f"http://{address_of(pod)}", question, most=len(resources_of(pod)))
        except (aiohttp.ClientError, TimeoutError, OSError) as err:
            return classify_error(err)


def classify_error(err: Exception) -> Unreachable:
    """Say what an error of a question means."""
    if isinstance(err, aiohttp.ConnectionTimeoutError):
        return Unreachable(Cause.NO_CONNECTION)
    if isinstance(err, TimeoutError):
        return Unreachable(Cause.NO_ANSWER)
    number = err.errno if isinstance(err, OSError) else None
    if number == errno.ECONNREFUSED:
        return Unreachable(Cause.REFUSED)
    if isinstance(err, aiohttp.ServerDisconnectedError) or number in (errno.ECONNRESET, errno.EPIPE):
        return Unreachable(Cause.CLOSED)
    if isinstance(err, aiohttp.ClientResponseError | aiohttp.ClientPayloadError):
        return Unreachable(Cause.NO_WORKER, "its answer is no HTTP")
    return Unreachable(Cause.OTHER, os.strerror(number) if number else type(err).__name__)


class Question:
    """A question to a pod, signed."""

    def __init__(self, method: str, path: str, pod_uid: str, key: bytes, body: bytes = b"") -> None:
        nonce = secrets.token_hex(16)
        self._method, self._path, self._body, self._key = method, path, body, key
        self._signature = sign_question(key, pod_uid, nonce, method, path, body)
        self.headers = {NONCE_HEADER: nonce, SIGNATURE_HEADER: self._signature, "Content-Type": "application/json"}

    def send(self, session: aiohttp.ClientSession, place: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send it to a process, and to no other one that this sends it on to."""
        url, data = f"{place}{self._path}", self._body or None
        return session.request(self._method, url, data=data, headers=self.headers, allow_redirects=False)

    def is_answered_by(self, signature: str, text: bytes) -> bool:
        """Tell whether an answer is signed with the same key, and answers this very question."""
        return is_same(signature, sign_answer(self._key, self._signature, text))


async def fetch_reports(
    session: aiohttp.ClientSession, place: str, question: Question, *, most: int = 1
) -> list[Report] | Unreachable:
    """Ask one process for its reports, `most` of them, and say why what it answers is not taken.

    The image is the user's: an answer may be anything, of any length, and must not send us elsewhere.

    Raises:
        aiohttp.ClientError, TimeoutError, OSError: it does not answer.

    """
    async with question.send(session, place) as answer:
        if answer.status != 200:
            cause = Cause.OTHER_KEY if answer.status == 401 else Cause.NO_WORKER
            return Unreachable(cause, f"it answers {answer.status}")
        text = await _read_some(answer.content, longest := max(1, most) * LONGEST_REPORT)
        signature = answer.headers.get(SIGNATURE_HEADER)
    reports = parse_reports(text.decode(errors="replace")) if len(text) <= longest else None
    if not reports:
        return Unreachable(Cause.NO_WORKER, "its answer is no report")
    if signature is None:
        return Unreachable(Cause.OTHER_KEY, "it does not sign its answers")
    if not question.is_answered_by(signature, text):
        return Unreachable(Cause.OTHER_KEY, "its answer is signed with that one")
    return reports


async def _read_some(content: aiohttp.StreamReader, longest: int) -> bytes:
    """Read all, or a little more than so many bytes."""
    text = b""
    async for chunk in content.iter_any():
        text += chunk
        if len(text) > longest:
            break
    return text


def _uid(pod: Body) -> str:
    uid: str = pod["metadata"]["uid"]
    return uid


def _full_name(pod: Body) -> str:
    return f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"


def resources_of(pod: Body) -> list[str]:
    """Name the resources that a pod runs."""
    return list(read_parts(pod["metadata"])) if is_shared(pod) else [key_of(pod)[1]]


def _answers(pod: Body) -> bool:
    status = pod.get("status") or {}
    return role_of(pod) in RUNNERS and status.get("phase") == "Running" and bool(status.get("podIP"))


def news_in(report: Report | None) -> Any:
    """What of a report is news at once; figures that always move wait for the next look."""
    if report is None:
        return None
    lease, mark = report.lease, report.high_water_mark
    return (
        report.instance,
        report.state,
        report.reason,
        report.message,
        report.claim_holder,
        (lease.held, lease.pod, lease.epoch) if lease is not None else None,
        report.partitioning,
        report.conflicts.count,
        report.conflicts.unowned_calls,
        report.conflicts.open,
        report.conflicts.last,
        (mark.transaction_id if mark.stalled else "") if mark is not None else None,
        _trouble(report),
        frozenset((held.partition, held.pod) for held in report.leases),
        report.unfinished.consumers if report.unfinished is not None else None,
        report.rebuild.state if report.rebuild is not None else None,
    )


def figures_in(report: Report | None) -> Any:
    """What of a report status shows and moves all the time; the time, and a mark that moves, are no figures."""
    if report is None:
        return None
    mark = report.high_water_mark
    return (
        report.checkpoints,
        report.lag,
        report.failures,
        mark if mark is not None and mark.stalled else None,
        report.rebuild,
        report.unfinished,
        report.executors,
        report.start_from_used,
        report.advice,
    )


def _trouble(report: Report) -> Any:
    """What failing messages did, without what changes with every attempt."""
    seen = report.failures
    if seen is None:
        return report.circuit
    keys = [(each.key, each.message_id, each.error_class, each.next_attempt_at is None) for each in seen.blocked_keys]
    return report.circuit, seen.dead_letters, min(seen.held, FEW), keys


async def tell_intent(pods: list[Body], intent: Intent, key: bytes, resources: list[str] | None = None) -> None:
    """Tell pods why they are taken away, of several resources of which ones; one that cannot hear vacates its claim.

    A grace outlasts that.
    """
    body = json.dumps({"intent": intent} if resources is None else {"intent": intent, "resources": resources}).encode()

    async def tell(session: aiohttp.ClientSession, pod: Body) -> None:
        question = Question("POST", "/intent", _uid(pod), key, body)
        try:
            async with question.send(session, f"http://{address_of(pod)}") as answer:
                if answer.status != 200:
                    log.warning("intent refused", extra={"pod": pod["metadata"]["name"], "status": answer.status})
        except (aiohttp.ClientError, TimeoutError, OSError) as err:
            log.info("intent not heard", extra={"pod": pod["metadata"]["name"], "error": type(err).__name__})

    async with aiohttp.ClientSession(timeout=INTENT_TIMEOUT) as session:
        await asyncio.gather(*(tell(session, pod) for pod in pods if _answers(pod)))
