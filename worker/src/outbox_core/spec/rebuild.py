"""A projection built anew beside the one that is read, and swapped for it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from outbox_core.spec.base import ProcessorId, SpecModel


class Rebuild(SpecModel):
    """Which processor this one replaces, and how its tables become the ones that are read."""

    processor_id: ProcessorId = Field(
        description="The processor to replace: same source, checkpoint in the same database. Both run until the swap."
    )
    swap_statement: Annotated[str, Field(min_length=1, max_length=65_536)] = Field(
        description=(
            "SQL, one or several statements, run once in the transaction of the swap: replace the view that readers "
            "read, or rename tables. This processor's own statement goes on unchanged after it, so the names that it "
            "writes to must stay."
        )
    )
    max_lag: Annotated[int, Field(ge=0, le=100_000)] = Field(
        1000,
        description=(
            "Swap when no more than so many messages lie between this checkpoint and the other one's: the transaction "
            "of the swap handles them, while the other processor waits."
        ),
    )
    hold: bool = Field(
        False,
        description="Catch up and keep up, but do not swap yet: look at the new tables first, then set it to false.",
    )
