"""Claim, lease, and the heartbeat that keeps both while the main thread is busy with a handler.

The heartbeat has a connection of its own and also looks around for status (lag, high-water mark, conflicts), so that a
status or metrics request never touches the database. What it is told it writes into `Ownership`; the main loop reads
it.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from typing_extensions import override

from outbox_worker.background import BackgroundThread
from outbox_worker.logs import about
from outbox_worker.ownership.renewal import OBSERVE_SECONDS
from outbox_worker.postgres.connection import send_if_idle_in_transaction
from outbox_worker.postgres.ownership import leases as calls

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from outbox_core.processor.outcomes import HeldLease
    from outbox_core.processor.state import ProcessorState
    from outbox_worker.engine.steps import StepContext
    from outbox_worker.observe.status import Progress
    from outbox_worker.observe.status_writer import StatusWriter
    from outbox_worker.ownership.renewal import Renewal
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.session import Session

LONGEST_BEAT: Final = 10.0
"""However long the lease: a claim that another pod of ours vacated is said again before its grace of 30 s is over."""
_LOOK_SECONDS: Final = 0.05
"""Where a process has many processors, between two looks around for one of them."""


class Losses(NamedTuple):
    """Why what was granted to this process is not its any more, as far as it was told; None while it is."""

    claim: str | None
    """Who has the claim now."""
    lease: str | None
    """Why the lease is believed lost.

    Also when it could not be renewed for as long as it lasts: a hint to stop starting work. The database judges.
    """
    given_back: bool
    """The heartbeat gave the lease back while the process was busy with another partition."""


class Ownership:
    """What this process holds, as far as it was told. Shared by the main thread and the heartbeat."""

    def __init__(self, lease_seconds: float) -> None:
        self._lock = threading.Lock()
        self._lease_seconds = lease_seconds
        self.lease: HeldLease | None = None
        """The lease held, lost or not."""
        self._renewed = 0.0
        self.claimed = False
        """The claim was granted to this process and not given back by it."""
        self._lease_lost: str | None = None
        self._claim_lost: str | None = None
        self._busy: Connection | None = None
        self._given_back = False
        self.decided: ProcessorState | None = None
        """What the main thread decided last; it alone writes it."""
        self._begun: ProcessorState | None = None
        """The state whose step the main thread began last."""

    def note_claim(self) -> None:
        """Remember that the claim is ours: from now on the heartbeat says so again."""
        with self._lock:
            self.claimed, self._claim_lost = True, None

    def note_lease(self, lease: HeldLease) -> None:
        """Remember that the lease is ours."""
        with self._lock:
            self.lease, self._renewed, self._lease_lost = lease, time.monotonic(), None
            self._given_back = False

    def note_renewal(self, lease: HeldLease) -> None:
        """Remember when the lease was last renewed."""
        with self._lock:
            if self.lease == lease:
                self._renewed = time.monotonic()

    def drop_lease(self) -> None:
        """Forget the lease: it was given back, or lost."""
        with self._lock:
            self.lease = self._lease_lost = None
            self._given_back = False

    def drop_claim(self) -> None:
        """Forget the claim."""
        with self._lock:
            self.claimed, self._claim_lost = False, None

    def lose_lease(self, lease: HeldLease, why: str) -> None:
        """The database said that this lease is not ours any more."""
        with self._lock:
            if self.lease == lease:
                self._lease_lost = why

    def lose_claim(self, why: str) -> None:
        """The database said that the claim is another's."""
        with self._lock:
            if self.claimed:
                self._claim_lost = why

    @property
    def losses(self) -> Losses:
        """What is believed lost."""
        with self._lock:
            return self._find_losses()

    def begin_step(self) -> Losses:
        """Say what is lost, and keep the heartbeat from giving the lease back while a step is done under it."""
        with self._lock:
            self._begun = self.decided
            return self._find_losses()

    def _find_losses(self) -> Losses:
        lease = self._lease_lost
        if lease is None and self.lease is not None:
            silent = time.monotonic() - self._renewed
            if silent > self._lease_seconds:
                lease = f"the lease was not renewed for {silent:.0f} s"
        return Losses(self._claim_lost, lease, self._given_back)

    def give_back(self, lease: HeldLease) -> bool:
        """Take the lease from a partition that rests; the caller releases it. False: it is in use, or another's."""
        with self._lock:
            rests = self.decided is not None and self.decided is not self._begun and self.decided.rests
            if not rests or self._given_back or self.lease != lease:
                return False
            self._given_back, self._lease_lost = True, "another replica shall own the partition"
            return True

    def enter(self, connection: Connection) -> None:
        """Let the heartbeat keep this connection's transaction from being idle while a handler computes."""
        with self._lock:
            self._busy = connection

    def leave(self) -> None:
        """End that."""
        with self._lock:
            self._busy = None

    def touch_transaction(self) -> None:
        """Send something on the handler's connection if it is between statements.

        A handler may compute for longer than the idle timeout, which is there for a process that is frozen: then this
        thread is frozen too, and the server ends the transaction as it should. So it should when the lease is lost: the
        next owner must not wait for a batch that will be refused.
        """
        losses = self.losses
        if losses.claim or losses.lease:
            return
        with self._lock:
            connection = self._busy
            if connection is None or not connection.lock.acquire(blocking=False):
                return  # no session, or a statement is running: not idle
            try:
                send_if_idle_in_transaction(connection)
            finally:
                connection.lock.release()


class Holding(NamedTuple):
    """What this process holds of one processor: the leases of its units, its claim, what its mode renews."""

    contexts: Sequence[StepContext]
    renewal: Renewal
    status_writer: StatusWriter

    @property
    def claimed(self) -> bool:
        """It has the claim."""
        return any(each.ownership.claimed for each in self.contexts)

    @property
    def is_empty(self) -> bool:
        """There is nothing to give back."""
        return not self.claimed and all(each.ownership.lease is None for each in self.contexts)


class Beat:
    """Of one processor: renews what its mode holds, says the claim again, observes."""

    def __init__(self, holding: Holding, on_loss: Callable[[], None]) -> None:
        """Keep what the process holds; `on_loss` wakes the main thread."""
        first = holding.contexts[0]
        self._holding = holding
        self._key, self._observer = first.key, first.observer
        self._resource = first.config.resource
        self._lease = first.config.delivery.lease_duration
        self._on_loss = on_loss
        self.names = first.status.names
        self.seconds = min(self._lease.total_seconds() / 3, holding.renewal.seconds)
        """At most between two ticks."""
        self._next_beat = 0.0
        self.next_look = 0.0
        """When it is to be looked around again."""

    def touch_transactions(self) -> None:
        """Keep transactions of handlers that compute from being idle for too long."""
        for each in self._holding.contexts:
            each.ownership.touch_transaction()

    @property
    def is_due(self) -> bool:
        """There is a claim to say again, or a schema to look at."""
        return self._holding.claimed or self._observer.ready

    def tick(self, connection: Connection) -> None:
        """Renew what is to be renewed by now, and see who else is there."""
        now = time.monotonic()
        if now >= self._next_beat or (self._holding.claimed and self._holding.status_writer.has_news):
            self._beat(connection)
            self._next_beat = now + min(self._lease.total_seconds() / 3, LONGEST_BEAT)
        if self._holding.claimed and self._holding.renewal.look(connection):
            self._on_loss()

    def look_around(self, connection: Connection, *, each: float) -> None:
        """Observe for status and metrics; `each`: seconds until the next time."""
        self.next_look = time.monotonic() + each
        self._observer.observe(connection)

    def _beat(self, connection: Connection) -> None:
        if self._holding.renewal.renew(connection):
            self._on_loss()
        if self._holding.claimed:
            self._say_claim(connection)
        if self._holding.claimed:
            self._holding.status_writer.write(connection, self._key, self._lease)

    def _say_claim(self, connection: Connection) -> None:
        """Undo a vacate of another pod of ours. Never more: the same resource created again has another uid."""
        answer = calls.fetch_claim(connection, self._key)
        if answer.holder is None or (answer.holder.uid == self._resource.uid and answer.vacated_at is not None):
            answer = calls.claim(connection, self._key, self._resource)
        if answer.holder is not None and answer.holder.uid != self._resource.uid:
            for each in self._holding.contexts:
                each.ownership.lose_claim(f"{answer.holder} took the claim")
            self._on_loss()


class Heartbeat(BackgroundThread):
    """Lets the beats of all processors of the process tick, on one connection. Runs until `stop`."""

    def __init__(self, session: Session, beats: Sequence[Beat], progress: Progress) -> None:
        super().__init__("heartbeat", session)
        self._beats = beats
        self._progress = progress
        self._interval = min(beat.seconds for beat in beats)
        self._observed_each = max(OBSERVE_SECONDS, len(beats) * _LOOK_SECONDS)

    @override
    def work(self) -> float:
        started = time.monotonic()
        self._progress.expect("heartbeat", within=self._interval + 90.0)
        for beat in self._beats:
            beat.touch_transactions()
        if any(beat.is_due for beat in self._beats):
            self.attempt(self._tick)
        return max(0.05, started + self._interval - time.monotonic())

    def _tick(self, connection: Connection) -> None:
        """Tick each, then look around for one after the other until leases are to be renewed again.

        A look may take a part of a lease, and those of all together would take more than one. What fails for one
        processor, but for the connection, fails for none of the others.
        """
        began, faults = time.monotonic(), list[Exception]()

        def attempt(beat: Beat, act: Callable[[Connection], None]) -> None:
            try:
                with about(beat.names):
                    act(connection)
            except Exception as err:
                if connection.closed:
                    raise
                faults.append(err)

        beats = [beat for beat in self._beats if beat.is_due]
        for beat in beats:
            attempt(beat, beat.tick)
        waiting = sorted((beat for beat in beats if beat.next_look <= began), key=lambda beat: beat.next_look)
        for number, beat in enumerate(waiting):
            if number and time.monotonic() - began >= self._interval:
                break
            attempt(beat, partial(beat.look_around, each=self._observed_each))
        if faults:
            raise faults[0]
