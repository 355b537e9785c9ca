"""Mode Competing: any number of consumers, each message handled by one of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import ConfigDict, Field

from outbox_core.spec.base import Duration, SpecModel, rule, rules


class Competing(SpecModel):
    """What the consumers of one processor compete for, and for how long a silent one keeps what it took."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "duration(self.leaseDuration) >= duration('2s') && duration(self.leaseDuration) <= duration('1h')",
                "competing.leaseDuration must be between 2s and 1h",
            ),
            rule(
                "duration(self.ageing) >= duration('1s')",
                "competing.ageing must be at least 1s: it is how much waiting one level of priority is worth",
            ),
            rule(
                "has(self.queue) == has(oldSelf.queue) && (!has(self.queue) || self.queue == oldSelf.queue)",
                "competing.queue cannot be changed: what was handed out of one means nothing to another; use another "
                "processorId",
            ),
        )
    )

    queue: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", min_length=1, max_length=40)] | None = Field(
        None,
        description=(
            "Name of a queue: its table `queue_NAME` in source.schemaName has priorities, delays and unique keys, and "
            "is emptied behind the consumers. Absent: the outbox itself, whose messages others may read too."
        ),
    )
    lease_duration: Duration = Field(
        timedelta(seconds=60),
        description=(
            "How long a silent consumer keeps what it took; after that any other takes it. Judged by the database."
        ),
    )
    ageing: Duration = Field(
        timedelta(minutes=1),
        description=(
            "With a queue: how much waiting one level of priority (0 first, 9 last) is worth, so that nothing waits "
            "without end behind what is more urgent."
        ),
    )
    keep_done: Duration = Field(
        timedelta(0), description="With a queue: for how long messages that are done are kept at least."
    )
