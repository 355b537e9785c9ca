"""What the operator hands to a worker or Spark driver: one JSON file, written by `manifests.py`, read at start.

No secret is in it: connections are directories of files (a mounted Secret), one per role.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import Field, ValidationInfo, field_validator

from outbox_core.report import Pair, ResourceRef
from outbox_core.spec import (
    Cursor,
    Delivery,
    Engine,
    Guarantee,
    Rebuild,
    Source,
    SparkPlan,
    SpecModel,
    StartFrom,
    Target,
)

CONFIG_PATH: Final = Path("/etc/outbox/processor.json")
PROCESSORS_PATH: Final = Path("/etc/outbox/processors")
"""The ConfigMap with a file for each processor of a shared pod."""
CONNECTIONS_PATH: Final = Path("/etc/outbox/connections")
"""Holds `source/` and `target/`, each a mounted Secret; in a shared pod a directory of its name for each Secret."""
KEY_PATH: Final = Path("/etc/outbox/key/key")
"""The resource's key, from a Secret that the operator makes (`proof.py`)."""
HANDLER_PATH: Final = Path("/etc/outbox/handler")
"""The ConfigMap with the user's Python files; put on sys.path."""


class ResolutionAction(StrEnum):
    """What a person decided about an open conflict."""

    ACCEPT = "Accept"
    """Go on from the stored pair."""
    REWIND = "Rewind"
    """Store `pair`, then go on from it."""


class Resolution(SpecModel):
    """A person's decision about one conflict; recorded in the audit log, carried out once."""

    conflict_id: int
    action: ResolutionAction
    pair: Pair | None = None
    """For Rewind: where to go on from. For Accept: the stored pair that the person saw; another one is refused."""
    decided_by: str = "annotation"


class ProcessorConfig(SpecModel):
    """One processor as a worker or driver runs it."""

    resource: ResourceRef
    generation: int
    processor_id: str
    engine: Engine = Engine.WORKER
    source: Source
    start_from: StartFrom = Field(default_factory=StartFrom)
    delivery: Delivery = Field(default_factory=Delivery)
    target: Target | None = None
    spark: SparkPlan | None = None
    rebuild_of: Rebuild | None = None
    resolution: Resolution | None = None
    text_id: int | None = None
    """Names the text of resource and handler, 63 bits, where nothing counts generations; None: `generation` does."""
    sweep_uids: list[str] = Field(default_factory=list)
    """Claims of resources of this cluster that are gone for certain: they may be replaced."""
    ignored: tuple[str, ...] = Field((), exclude=True)
    """Fields of the file that this version does not know: a newer operator wrote them."""

    @field_validator("source")
    @classmethod
    def _name_the_engines_cursor(cls, source: Source, info: ValidationInfo) -> Source:
        """Engine Spark has one cursor, so a resource that names none names it; engine Worker's depends on the row."""
        if info.data.get("engine") is Engine.SPARK and source.cursor is None:
            return source.model_copy(update={"cursor": Cursor.TRANSACTION_ORDER})
        return source

    @property
    def fingerprint(self) -> int:
        """What is run: under another one, processes that a message killed are no longer counted against it."""
        return self.generation if self.text_id is None else self.text_id

    @property
    def has_remote_target(self) -> bool:
        """Effects and checkpoint are in another database than the messages."""
        return self.target is not None and self.target.database is not None

    @property
    def numbers_messages(self) -> bool:
        """The target's receiver drops what it has by numbers (`progress.numbering`), which checkpoints carry."""
        return self.target is not None and self.target.kind.numbers

    @property
    def plan(self) -> SparkPlan:
        """What the Spark driver must know: as asked, or the defaults."""
        return self.spark or SparkPlan()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee in force: as asked, or the strongest that the target has."""
        if self.delivery.guarantee is not None:
            return self.delivery.guarantee
        in_transaction = self.target is None or self.target.kind.transactional
        return Guarantee.TRANSACTIONAL if in_transaction else Guarantee.AT_LEAST_ONCE
