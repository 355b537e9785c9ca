"""A running pod that does not answer the operator: what was met, when it is told, and what a person reads."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from outbox_core.report import STATUS_PORT
from outbox_operator.api.keys import Keys
from outbox_operator.decision.decide import decide
from outbox_operator.decision.reachability import (
    READY_FOR,
    STARTED_FOR,
    Cause,
    Unreachable,
    describe_unreachable,
    is_overdue,
)
from outbox_operator.reconcile.reports import PATIENCE, Heard, Question, Reporters, classify_error, fetch_reports
from tests.unit.operator.building import ACTIVE, GRANTED, NOW, build_observed, build_pod, build_report
from tests.unit.operator.owned import EVERYTHING, LONG_AGO, REPLICA_SET, store_of
from tests.unit.operator.owned import build_pod as build_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from outbox_operator.watch.store import Body

KEYS = Keys(b"installation")
SECRET = KEYS.secret_name("orders", "uid-of-OutboxProcessor-orders")


async def question_to(port: int) -> Unreachable:
    """What the operator makes of a process of this machine."""
    timeout = aiohttp.ClientTimeout(total=0.6, connect=0.3)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        try:
            found = await fetch_reports(session, f"http://127.0.0.1:{port}", Question("GET", "/status", "pod", b"key"))
        except (aiohttp.ClientError, TimeoutError, OSError) as err:
            return classify_error(err)
    assert isinstance(found, Unreachable)
    return found


@asynccontextmanager
async def server(answer: bytes | None, *, hold: bool = False) -> AsyncIterator[int]:
    """A process that gives one answer to every question; `hold`: that keeps the connection open."""

    over, served = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        if answer is not None:
            writer.write(answer)
        if hold:
            await over.wait()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        served.set()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield listening.sockets[0].getsockname()[1]
    over.set()
    await served.wait()
    listening.close()


async def test_a_port_where_nothing_listens_refuses():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert await question_to(bound.getsockname()[1]) == Unreachable(Cause.REFUSED)


@contextmanager
def full_backlog() -> Iterator[int]:
    """A socket whose queue is full: the kernel drops the packets that ask for a connection, as a firewall does."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        place = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(place)
        yield place[1]
        for each in waiting:
            each.close()


async def test_packets_that_are_dropped_make_no_connection():
    with full_backlog() as port:
        assert await question_to(port) == Unreachable(Cause.NO_CONNECTION)


async def test_a_process_that_takes_the_question_and_says_nothing():
    async with server(None, hold=True) as port:
        assert await question_to(port) == Unreachable(Cause.NO_ANSWER)


async def test_a_connection_that_is_closed_without_an_answer():
    async with server(None) as port:
        assert await question_to(port) == Unreachable(Cause.CLOSED)


async def test_what_speaks_another_protocol_is_no_worker():
    async with server(b"\x15\x03\x01\x00\x02\x02\x16 not HTTP\r\n\r\n") as port:
        assert await question_to(port) == Unreachable(Cause.NO_WORKER, "its answer is no HTTP")


def test_another_error_is_named_in_the_systems_words():
    assert classify_error(OSError(113, "any")) == Unreachable(Cause.OTHER, "No route to host")


def running(ready: float | None = None, started: float | None = None) -> Body:
    """A pod that is ready, and whose container runs, for so many seconds."""

    def at(seconds: float) -> str:
        return (NOW - timedelta(seconds=seconds)).isoformat()

    pod = build_body("orders-0", REPLICA_SET)
    if ready is not None:
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": at(ready)}]
    if started is not None:
        pod["status"]["containerStatuses"] = [{"state": {"running": {"startedAt": at(started)}}}]
    return pod


LONG = STARTED_FOR.total_seconds() + 1
WHEN = [
    pytest.param({"ready": READY_FOR.total_seconds() + 1, "started": 20}, True, id="ready long enough to be heard"),
    pytest.param({"ready": READY_FOR.total_seconds() - 1, "started": LONG}, False, id="ready only now"),
    pytest.param({"started": STARTED_FOR.total_seconds() - 1}, False, id="not ready: it may still be starting"),
    pytest.param({"started": LONG}, True, id="not ready and long started: it never will be"),
    pytest.param({}, False, id="its container does not run"),
]


@pytest.mark.parametrize(("times", "told"), WHEN)
def test_an_unreachable_pod_is_told_of_once_the_pod_had_time_to_be_heard(times: dict[str, float], *, told: bool):
    assert is_overdue(running(**times), NOW) is told


ALLOW = "allow ingress to TCP port 8080 of the pods of namespace shop from namespace system"
REMEDIES = [
    pytest.param(Unreachable(Cause.NO_CONNECTION), ["no connection is made in time.", ALLOW], id="dropped"),
    pytest.param(
        Unreachable(Cause.REFUSED), ["the connection is refused.", "its image serves that port", ALLOW], id="no"
    ),
    pytest.param(Unreachable(Cause.OTHER, "No route to host"), ["(No route to host).", ALLOW], id="no route"),
    pytest.param(
        Unreachable(Cause.CLOSED), ["closed without an answer.", "a service mesh", "exclude that port"], id="mTLS"
    ),
    pytest.param(Unreachable(Cause.NO_WORKER, "it answers 503"), ["(it answers 503).", "a service mesh"], id="a proxy"),
    pytest.param(Unreachable(Cause.NO_ANSWER), ["does not answer in time.", "its node is overloaded"], id="frozen"),
    pytest.param(
        Unreachable(Cause.OTHER_KEY, "it answers 401"),
        [
            "it has another key than this operator (it answers 401).",
            "no other operator serves namespace shop",
            "delete Secret orders-key-12345678 and this pod",
        ],
        id="another key",
    ),
]


@pytest.mark.parametrize(("unreachable", "parts"), REMEDIES)
def test_a_person_reads_which_pod_where_what_was_met_and_what_to_do(unreachable: Unreachable, parts: list[str]):
    said = describe_unreachable(unreachable, running(), "system", "orders-key-12345678")
    assert said.startswith("pod orders-0 runs, and the operator does not hear it at 127.0.0.1:8080: ")
    for part in parts:
        assert part in said


def test_each_cause_has_a_remedy():
    for cause in Cause:
        assert len(describe_unreachable(Unreachable(cause), running(), "system", "key").partition(". ")[2]) > 20


def test_the_address_of_a_pod_with_ipv6_is_one_that_can_be_asked():
    pod = running()
    pod["status"]["podIP"] = "fd00::7"
    assert f"[fd00::7]:{STATUS_PORT}" in describe_unreachable(Unreachable(Cause.REFUSED), pod, "system", "key")


def reporters_of(pod: Body, entry: Heard) -> Reporters:
    """What asks one pod, after it has met something there."""
    reporters = Reporters(store_of(*EVERYTHING, pod), KEYS, "system", lambda *_: None)
    reporters._heard[pod["metadata"]["uid"]] = entry
    return reporters


def old(*, ready: bool = True) -> Body:
    pod = build_body("orders-0", REPLICA_SET)
    if ready:
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": LONG_AGO}]
    return pod


REFUSED = Unreachable(Cause.REFUSED)
ASKED = [
    pytest.param(old(), Heard(missed=1), REFUSED, "is refused", id="never heard, long ready"),
    pytest.param(old(ready=False), Heard(missed=9), REFUSED, "", id="never heard, not yet to be expected"),
    pytest.param(old(), Heard({"orders": build_report()}, missed=PATIENCE - 1), REFUSED, "", id="missed once"),
    pytest.param(
        old(ready=False), Heard({"orders": build_report()}, missed=PATIENCE), REFUSED, "is refused", id="missed again"
    ),
    pytest.param(old(), Heard({"orders": build_report()}), None, "", id="heard"),
    pytest.param(old(), Heard(missed=3), None, "", id="it cannot be asked: it does not run"),
]


@pytest.mark.parametrize(("pod", "entry", "met", "said"), ASKED)
def test_what_was_met_is_told_of_a_pod_that_should_be_heard(
    pod: Body, entry: Heard, met: Unreachable | None, said: str
):
    told = reporters_of(pod, entry)._describe_unreachable(pod, entry, met)
    assert (said in told) if said else told == ""
    assert ("from namespace system" in told) == bool(said)


def test_of_a_pod_with_another_key_the_secret_is_named():
    pod, entry = old(), Heard()
    said = reporters_of(pod, entry)._describe_unreachable(pod, entry, Unreachable(Cause.OTHER_KEY))
    assert f"delete Secret {SECRET}" in said


async def test_it_is_news_when_a_pod_is_told_as_unreachable_and_when_it_answers_again(monkeypatch: pytest.MonkeyPatch):
    pod, told = old(), []
    reporters = Reporters(store_of(*EVERYTHING, pod), KEYS, "system", lambda key, _: told.append(key))
    met: list[Any] = [Unreachable(Cause.REFUSED), Unreachable(Cause.REFUSED), Unreachable(Cause.NO_CONNECTION)]

    async def fetch(*_: Any) -> Any:
        return met.pop(0)

    monkeypatch.setattr(reporters, "_fetch", fetch)
    async with aiohttp.ClientSession() as session:
        counts = []
        while met:
            await reporters._ask(session, pod)
            counts.append(len(told))
    assert counts == [1, 1, 2], "what stays the same is no news"


def conditions(*pods: Any, **fields: Any) -> tuple[dict[str, tuple[str, str]], list[str], str]:
    decision = decide(build_observed(*pods, previous=GRANTED, **fields), NOW)
    found = {each.type: (each.status, each.reason) for each in decision.status.conditions}
    message = next(each.message for each in decision.status.conditions if each.type == "WorkersAvailable")
    return found, [event.reason for event in decision.events if event.warning], message


def test_a_pod_that_was_never_heard_is_told_and_nothing_is_scaled_down():
    found, events, _ = conditions(build_pod(unreachable_message="pod orders-0 is out of reach"))
    assert found["Ready"] == ("Unknown", "WorkerUnreachable")
    assert found["WorkersAvailable"] == ("False", "WorkerUnreachable")
    assert events == ["WorkerUnreachable"]
    assert decide(build_observed(build_pod(unreachable_message="out of reach"), previous=GRANTED), NOW).replicas == 1


def test_one_of_two_pods_out_of_reach_is_told_beside_ready():
    silent = build_pod("orders-1", unreachable_message="pod orders-1 is out of reach")
    found, events, message = conditions(ACTIVE, silent)
    assert found["Ready"] == ("True", "Running")
    assert found["WorkersAvailable"] == ("False", "WorkerUnreachable")
    assert message == "pod orders-1 is out of reach"
    assert events == ["WorkerUnreachable"]


def test_it_is_told_once():
    silent = build_pod("orders-1", unreachable_message="pod orders-1 is out of reach")
    first = decide(build_observed(ACTIVE, silent, previous=GRANTED), NOW)
    again = decide(build_observed(ACTIVE, silent, previous=first.status), NOW)
    assert [event.reason for event in again.events] == []


def test_several_are_counted():
    pods = [build_pod(f"orders-{n}", unreachable_message=f"pod orders-{n} is out of reach") for n in range(3)]
    assert conditions(*pods)[2] == "pod orders-0 is out of reach; 2 more pods are not heard"


@pytest.mark.parametrize("changed", [{"deleting": True}, {"intent_hash": "former"}])
def test_a_pod_that_goes_anyway_is_not_told(changed: dict[str, Any]):
    found, events, _ = conditions(replace(build_pod(unreachable_message="out of reach"), **changed))
    assert found["Ready"][1] != "WorkerUnreachable"
    assert found["WorkersAvailable"][1] != "WorkerUnreachable"
    assert events == []


def test_a_shared_pod_that_answers_for_others_alone_is_told():
    """It could not read this resource's configuration, and never will: to wait for its report would be for good."""
    found, events, _ = conditions(build_pod(reachable=True))
    assert found["Ready"] == ("False", "InvalidConfiguration")
    assert events == ["InvalidConfiguration"]
    assert decide(build_observed(build_pod(reachable=True), previous=GRANTED), NOW).replicas == 1
