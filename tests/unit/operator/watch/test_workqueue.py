"""One reconcile at a time for each key, failures backed off, and for how long the queue is stuck."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from outbox_operator.watch.workqueue import KeyedQueue

if TYPE_CHECKING:
    import pytest


async def test_one_key_is_worked_on_once_at_a_time_and_failures_back_off():
    running: set[tuple[str, str]] = set()
    calls: list[tuple[float, tuple[str, str]]] = []
    done = asyncio.Event()

    async def work(key: tuple[str, str]) -> float | None:
        assert key not in running
        running.add(key)
        await asyncio.sleep(0.02)
        running.discard(key)
        calls.append((time.monotonic(), key))
        if key == ("a", "fails") and sum(seen == key for _, seen in calls) < 2:
            raise OSError("once")
        if sum(seen == ("a", "fails") for _, seen in calls) >= 2:
            done.set()
        return None

    queue = KeyedQueue(work, workers=4)
    for _ in range(5):
        queue.add(("a", "b"))
        queue.add(("a", "fails"))
    async with asyncio.timeout(10):
        task = asyncio.create_task(queue.run())
        await asyncio.sleep(0.005)
        queue.add(("a", "b"))
        await done.wait()
        task.cancel()
    failing = [when for when, key in calls if key == ("a", "fails")]
    assert failing[1] - failing[0] >= 0.5
    assert sum(key == ("a", "b") for _, key in calls) == 2


async def test_a_key_whose_work_takes_long_delays_no_other_although_it_is_due_again():
    slow, other = ("a", "slow"), ("a", "other")
    started, seen, release = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work(key: tuple[str, str]) -> float | None:
        if key == other:
            seen.set()
        elif not started.is_set():
            started.set()
            await release.wait()
        return None

    queue = KeyedQueue(work, workers=2)
    queue.add(other, 0.2)
    queue.add(slow)
    task = asyncio.create_task(queue.run())
    async with asyncio.timeout(5):
        await started.wait()
        queue.add(slow)
        await seen.wait()
    release.set()
    task.cancel()
    assert seen.is_set()


async def test_it_ends_when_it_is_cancelled_while_keys_come_in():
    """Each number of steps between the last key and the end is tried: one of them used to lose the cancellation."""

    async def work(_key: tuple[str, str]) -> float | None:
        return None

    for steps in range(12):
        queue = KeyedQueue(work)
        task = asyncio.create_task(queue.run())
        await asyncio.sleep(0.01)
        for number in range(steps):
            queue.add(("a", str(number)), 60.0)
            await asyncio.sleep(0)
        task.cancel()
        for number in range(steps):
            queue.add(("b", str(number)), 60.0)
            await asyncio.sleep(0)
        ended, _ = await asyncio.wait({task}, timeout=5)
        assert ended, f"it works on after {steps} steps"


async def test_a_key_that_becomes_due_after_an_idle_time_is_stuck_only_from_then_on(monkeypatch: pytest.MonkeyPatch):
    clock = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    async def work(_key: tuple[str, str]) -> float | None:
        return None

    queue = KeyedQueue(work)
    queue.add(("a", "first"), 600.0)
    queue.add(("a", "later"), 605.0)
    stuck, depth = [], []
    for seconds in (599.0, 2.0, 9.0):
        clock[0] += seconds
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        stuck.append(round(queue.stuck_seconds, 3))
        depth.append(queue.depth)
    assert (stuck, depth) == ([0.0, 0.0, 9.0], [0, 1, 2])
    monkeypatch.undo()


async def test_a_key_is_due_at_the_soonest_of_the_times_that_were_asked_for_and_not_once_it_is_forgotten():
    seen: list[tuple[str, str]] = []

    async def work(key: tuple[str, str]) -> float | None:
        seen.append(key)
        return None

    queue = KeyedQueue(work, workers=1)
    queue.add(("a", "sooner"), 60.0)
    queue.add(("a", "sooner"), 0.02)
    queue.add(("a", "sooner"), 60.0)
    queue.add(("a", "now"), 60.0)
    queue.add(("a", "now"))
    for delay in (0.0, 0.02):
        queue.add(("a", "forgotten"), delay)
        queue.forget(("a", "forgotten"))
    queue.add(("a", "last"), 0.05)
    task = asyncio.create_task(queue.run())
    async with asyncio.timeout(10):
        while ("a", "last") not in seen:  # noqa: ASYNC110 - what is looked at announces nothing
            await asyncio.sleep(0.005)
    task.cancel()
    assert seen == [("a", "now"), ("a", "sooner"), ("a", "last")]
