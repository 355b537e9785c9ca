"""Whether this process can start the threads of a Kafka client: looked at before one is made.

librdkafka does not bear it where it cannot: it ends the process, or waits without an end and hears no signal.
"""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Final

from outbox_core.errors import TransientError
from outbox_core.report import Reason

if TYPE_CHECKING:
    from outbox_worker.targets.librdkafka.settings import BrokerSettings

_OWN: Final = 4
"""Threads of a client beside one for each broker that the Secret names."""


def check_threads(settings: BrokerSettings) -> None:
    """Start as many threads as a client does, and end them.

    Raises:
        TransientError: this process may have no more of them.

    """
    over = Event()
    started: list[Thread] = []
    needed = _OWN + len(settings.servers.split(","))
    try:
        for _ in range(needed):
            thread = Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as err:
        raise TransientError(
            f"this process cannot start the {needed} threads of a Kafka client: raise its limit (the pod's process "
            "ids, ulimit -u)",
            reason=Reason.TARGET_UNAVAILABLE,
        ) from err
    finally:
        over.set()
        for thread in started:
            thread.join()
