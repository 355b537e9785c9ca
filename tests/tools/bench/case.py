"""The shape of a case, and of what it compares."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.tools.ledger.account import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from tests.tools.bench.candidates.targets import Queue
    from tests.tools.bench.figures import Figure, Result
    from tests.tools.bench.machine import Others
    from tests.tools.bench.servers import Place
    from tests.tools.ledger.account import Handled


class Candidate(ABC):
    """One thing that a case measures: our worker with some settings, or a peer.

    It is started once, handles every run's rows, and is paused while others have their turn.

    Attributes:
        name: as the table shows it.
        settings: what is not a default, for the page.
        ours: the product; peers and smaller programs are what it is compared with.
        order: what the ledger asks of its target.
        queue: of RabbitMQ, into which it publishes, if it does.
        notified: producers tell it by NOTIFY, on the channel `bench`, that there is something.
        copies: it reads rows of its own, so it can be given fewer than the others.

    """

    ours = False
    order = Order.TOTAL
    copies = False
    notified = False
    queue: Queue | None = None

    def __init__(self, name: str, settings: str = "") -> None:
        self.name = name
        self.settings = settings

    @abstractmethod
    def start(self, place: Place) -> None:
        """Start it, and return when it waits for messages."""

    @abstractmethod
    def pids(self) -> Mapping[str, int]:
        """Return its processes by the name that the table shows."""

    def add(self, first: int, last: int) -> None:  # noqa: B027 - what reads the outbox has its rows
        """Commit the rows into a table of its own."""

    @abstractmethod
    def count(self) -> int:
        """Return how many messages its target has taken since `take`; cheap, for it is asked many times a second."""

    @abstractmethod
    def take(self) -> Iterable[Handled]:
        """Read what the target has, in the target's order, and empty it."""

    @abstractmethod
    def stop(self) -> None:
        """End it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line chose."""

    seconds: float
    runs: int


@dataclass(slots=True)
class Measured:
    """What came of a case."""

    results: list[Result]
    others: list[Others] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Case:
    """One line of the table of cases.

    Attributes:
        name: as `CASE=` names it.
        title: what the page says above its table.
        about: what is compared, and with which settings.
        candidates: makes what is compared.
        measure: how; `throughput`, `latency` or `idle`.
        figures: what each run measures.
        servers: whose CPU time is shown beside the candidates'.
        cpu: what the CPU times of the table are.

    """

    name: str
    title: str
    about: str
    candidates: Callable[[], list[Candidate]]
    measure: Callable[[Case, Place, Options], Measured]
    figures: tuple[Figure, ...]
    servers: tuple[str, ...] = ("PostgreSQL",)
    cpu: str = "CPU microseconds a message"
