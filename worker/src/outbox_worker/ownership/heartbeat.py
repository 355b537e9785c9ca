"""Claim, lease, and the heartbeat that keeps both while the main thread is busy with a handler.

The heartbeat has a connection of its own and also looks around for status (lag, high-water mark, conflicts), so that a
status or metrics request never touches the database. What it is told it writes into `Ownership`; the main loop reads
it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from outbox_core.errors import OutboxError
from outbox_core.processor.outcomes import HeldLease
from outbox_worker.logs import get_logger
from outbox_worker.postgres.connection import send_if_idle_in_transaction
from outbox_worker.postgres.errors import DatabaseError
from outbox_worker.postgres.ownership import leases as calls
from outbox_worker.postgres.ownership import partitions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta

    from outbox_core.report import ResourceRef
    from outbox_worker.observe.observer import Observer
    from outbox_worker.observe.speaker import Speaker
    from outbox_worker.observe.status import Progress
    from outbox_worker.ownership.membership import Membership
    from outbox_worker.postgres.connection import Connection
    from outbox_worker.postgres.key import ProcessorKey
    from outbox_worker.session import Session

OBSERVE_SECONDS: Final = 2.0
LONGEST_BEAT: Final = 10.0
"""However long the lease: a claim that another pod of ours vacated is said again before its grace of 30 s is over."""
LOOK_SECONDS: Final = 0.7
_log = get_logger("outbox.heartbeat")


class Ownership:
    """What this process holds, as far as it was told. Shared by the main thread and the heartbeat."""

    def __init__(self, lease_seconds: float) -> None:
        """Hold nothing."""
        self._lock = threading.Lock()
        self._lease_seconds = lease_seconds
        self._lease: HeldLease | None = None
        self._renewed = 0.0
        self._claimed = False
        self._lease_lost: str | None = None
        self._claim_lost: str | None = None
        self._busy: Connection | None = None
        self._resting = False
        self._given_back = False

    def note_claim(self) -> None:
        """Remember that the claim is ours: from now on the heartbeat says so again."""
        with self._lock:
            self._claimed, self._claim_lost = True, None

    def note_lease(self, lease: HeldLease) -> None:
        """Remember that the lease is ours."""
        with self._lock:
            self._lease, self._renewed, self._lease_lost = lease, time.monotonic(), None
            self._given_back = False

    def note_renewal(self, lease: HeldLease) -> None:
        """Remember when the lease was last renewed."""
        with self._lock:
            if self._lease == lease:
                self._renewed = time.monotonic()

    def drop_lease(self) -> None:
        """Forget the lease: it was given back, or lost."""
        with self._lock:
            self._lease = self._lease_lost = None
            self._given_back = False

    def drop_claim(self) -> None:
        """Forget the claim."""
        with self._lock:
            self._claimed, self._claim_lost = False, None

    def lose_lease(self, lease: HeldLease, why: str) -> None:
        """The database said that this lease is not ours any more."""
        with self._lock:
            if self._lease == lease:
                self._lease_lost = why

    def lose_claim(self, why: str) -> None:
        """The database said that the claim is another's."""
        with self._lock:
            if self._claimed:
                self._claim_lost = why

    @property
    def lease(self) -> HeldLease | None:
        """The lease held, lost or not."""
        with self._lock:
            return self._lease

    @property
    def claimed(self) -> bool:
        """The claim was granted to this process and not given back by it."""
        with self._lock:
            return self._claimed

    @property
    def claim_lost(self) -> str | None:
        """Who has the claim now; None while it is ours."""
        with self._lock:
            return self._claim_lost

    @property
    def lease_lost(self) -> str | None:
        """Why the lease is believed lost; None while it is ours.

        Also when it could not be renewed for as long as it lasts: a hint to stop starting work. The database judges.
        """
        with self._lock:
            if self._lease is not None and self._lease_lost is None:
                silent = time.monotonic() - self._renewed
                if silent > self._lease_seconds:
                    return f"the lease was not renewed for {silent:.0f} s"
            return self._lease_lost

    def begin_step(self) -> bool:
        """Keep the heartbeat from giving the lease back while a step is done under it; False.

        It was given back already.
        """
        with self._lock:
            self._resting = False
            return not self._given_back

    def rest(self) -> None:
        """Nothing is in hand: the lease may be given back until the next step begins."""
        with self._lock:
            self._resting = True

    def give_back(self, lease: HeldLease) -> bool:
        """Take the lease from a partition that rests; the caller releases it. False: it is in use, or another's."""
        with self._lock:
            if not self._resting or self._given_back or self._lease != lease:
                return False
            self._given_back, self._lease_lost = True, "another replica shall own the partition"
            return True

    @property
    def given_back(self) -> bool:
        """The lease was given back while the process was busy with another partition."""
        with self._lock:
            return self._given_back

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
        if self.lease_lost is not None or self.claim_lost is not None:
            return
        with self._lock:
            connection = self._busy
            if connection is None or not connection.lock.acquire(blocking=False):
                return  # no session, or a statement is running: not idle
            try:
                send_if_idle_in_transaction(connection)
            finally:
                connection.lock.release()


class Heartbeat(threading.Thread):
    """Renews the lease, says the claim again, observes. Runs until `stop`."""

    def __init__(  # noqa: PLR0913 - wired once, in main.py
        self,
        *,
        session: Session,
        key: ProcessorKey,
        resource: ResourceRef,
        lease: timedelta,
        ownerships: Sequence[Ownership],
        observer: Observer,
        progress: Progress,
        speaker: Speaker,
        on_loss: Callable[[], None],
    ) -> None:
        """Keep what is needed: an ownership for each partition; `on_loss` wakes the main thread."""
        super().__init__(name="heartbeat", daemon=True)
        self._speaker = speaker
        self._session = session
        self._key = key
        self._resource = resource
        self._lease = lease
        self._ownerships = ownerships
        self._observer = observer
        self._progress = progress
        self._on_loss = on_loss
        self._stopping = threading.Event()
        self._failing = False
        self._next_observation = self._next_beat = 0.0

    @override
    def run(self) -> None:
        """Tick until stopped."""
        interval = self._interval
        while not self._stopping.is_set():
            started = time.monotonic()
            self._progress.expect("heartbeat", within=interval + 90.0)
            self._tick(started)
            self._stopping.wait(max(0.05, started + interval - time.monotonic()))
        self._session.discard()

    def stop(self) -> None:
        """End the thread and wait for it: after this it says nothing again that was given back."""
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=1.5)

    @property
    def _interval(self) -> float:
        return min(self._lease.total_seconds() / 3, OBSERVE_SECONDS)

    @property
    def _claimed(self) -> bool:
        return any(ownership.claimed for ownership in self._ownerships)

    def _tick(self, now: float) -> None:
        for ownership in self._ownerships:
            ownership.touch_transaction()
        if not self._claimed and not self._observer.ready:
            return
        try:
            connection = self._session.connection()
            if now >= self._next_beat or (self._claimed and self._speaker.has_news):
                self._beat(connection)
                self._next_beat = now + min(self._lease.total_seconds() / 3, LONGEST_BEAT)
            if now >= self._next_observation:
                self._next_observation = now + OBSERVE_SECONDS
                self._observer.observe(connection)
            self._failing = False
        except (OutboxError, DatabaseError) as err:
            self._session.discard()
            if not self._failing:
                _log.warning("heartbeat failed", extra={"error": str(err)})
            self._failing = True
        except Exception:  # noqa: BLE001 - the thread must not die: without it the lease lapses
            self._session.discard()
            _log.exception("heartbeat failed unexpectedly")

    def _beat(self, connection: Connection) -> None:
        self._renew(connection)
        if self._claimed:
            self._say_claim(connection)
        if self._claimed:
            self._speaker.say(connection, self._key, self._lease)

    def _renew(self, connection: Connection) -> None:
        (ownership,) = self._ownerships
        lease = ownership.lease
        if lease is not None:
            renewed = calls.renew_lease(connection, self._key, epoch=lease.epoch, token=lease.token, lease=self._lease)
            self._note(ownership, lease, renewed=renewed)
            if renewed:
                self._end_stuck_transactions(connection, self._key, lease)

    def _note(self, ownership: Ownership, lease: HeldLease, *, renewed: bool) -> None:
        if renewed:
            ownership.note_renewal(lease)
        else:
            ownership.lose_lease(lease, f"the lease of epoch {lease.epoch} lapsed or is another's")
            self._on_loss()

    @staticmethod
    def _end_stuck_transactions(connection: Connection, key: ProcessorKey, lease: HeldLease) -> None:
        stuck = calls.end_stuck_transactions(connection, key, epoch=lease.epoch)
        if stuck.ended:
            _log.warning("ended transactions that a former owner left stuck", extra={"count": stuck.ended})

    def _say_claim(self, connection: Connection) -> None:
        """Undo a vacate of another pod of ours. Never more: the same resource created again has another uid."""
        answer = calls.fetch_claim(connection, self._key)
        if answer.holder is None or (answer.holder.uid == self._resource.uid and answer.vacated_at is not None):
            answer = calls.claim(connection, self._key, self._resource)
        if answer.holder is not None and answer.holder.uid != self._resource.uid:
            for ownership in self._ownerships:
                ownership.lose_claim(f"{answer.holder} took the claim")
            self._on_loss()


class PartitionedHeartbeat(Heartbeat):
    """The same for a partitioned processor: renews membership and all leases at once, and looks who shall own what."""

    def __init__(self, *, membership: Membership, pod: str, **parts: Any) -> None:
        """Keep what is needed beyond a heartbeat's parts."""
        super().__init__(**parts)
        self._membership = membership
        self._pod = pod
        self._since: dict[HeldLease, float] = {}
        self._unwanted: frozenset[HeldLease] = frozenset()
        self._leaving: list[HeldLease] = []
        self._orphans: frozenset[HeldLease] = frozenset()

    @property
    @override
    def _interval(self) -> float:
        # A takeover takes the lease and less than this.
        return min(self._lease.total_seconds() / 3, LOOK_SECONDS)

    @override
    def _tick(self, now: float) -> None:
        super()._tick(now)
        if self._failing or not self._claimed:
            return
        try:
            connection = self._session.connection()
            seen = partitions.fetch_owners(
                connection, self._key, claim_uid=self._resource.uid, count=self._membership.count
            )
            there = partitions.fetch_count(connection, self._key)
            self._give_back(connection)
        except (OutboxError, DatabaseError) as err:
            _log.warning("could not look who owns what", extra={"error": str(err)})
            return
        self._membership.note_count(there)
        if self._membership.note(seen) or self._membership.outdated:
            self._on_loss()

    def _find_orphans(self, epochs: Mapping[int, int]) -> None:
        """Let go of what is renewed with this token and no runner knows of: the answer to acquiring it was lost.

        Not at first sight: a runner may be told of it at this moment.
        """
        known = {ownership.lease for ownership in self._ownerships}
        token = self._membership.token
        orphans = frozenset(HeldLease(partition, epoch, token) for partition, epoch in epochs.items()) - known
        self._leaving += sorted((orphans & self._orphans) - set(self._leaving), key=lambda lease: lease.partition)
        self._orphans = orphans

    def _give_back(self, connection: Connection) -> None:
        """Give back what another process shall own, where the main thread is too busy with one partition to do so.

        Not at first sight: as a rule the main thread does it at once. What could not be released is tried again; else
        it would be renewed without end.
        """
        held = {lease: ownership for ownership in self._ownerships if (lease := ownership.lease) is not None}
        unwanted = frozenset(lease for lease in held if not self._membership.is_assigned(lease.partition))
        self._leaving += [lease for lease in unwanted & self._unwanted if held[lease].give_back(lease)]
        self._unwanted = unwanted
        while self._leaving:
            lease = self._leaving[0]
            key = replace(self._key, partition=lease.partition)
            calls.release_lease(connection, key, epoch=lease.epoch, token=lease.token)
            del self._leaving[0]

    @override
    def _renew(self, connection: Connection) -> None:
        # Before the call: a lease that the main thread acquires meanwhile is not among the answers.
        held = [(ownership, lease) for ownership in self._ownerships if (lease := ownership.lease) is not None]
        if not self._claimed:
            return
        epochs = partitions.renew_membership(
            connection, self._key, claim_uid=self._resource.uid, pod=self._pod, token=self._membership.token,
            lease=self._lease,
        )  # fmt: skip
        now = time.monotonic()
        for ownership, lease in held:
            renewed = epochs.get(lease.partition) == lease.epoch
            self._note(ownership, lease, renewed=renewed)
            # Only after a move: then a former owner's process may be stuck. One statement for each partition and beat
            # all the time would cost as much as handling.
            since = self._since.setdefault(lease, now)
            if renewed and now - since < 2 * self._lease.total_seconds():
                key = replace(self._key, partition=lease.partition)
                self._end_stuck_transactions(connection, key, lease)
        self._find_orphans(epochs)
        current = {lease for _, lease in held}
        self._since = {lease: since for lease, since in self._since.items() if lease in current}
