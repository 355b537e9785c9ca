"""PURE: what must hold at every moment, not only at the end: checkpoints never move back, epochs never overlap.

An observer's samples show checkpoints and leases while processes work; effects that name the epoch in which they were
made show, by the time of their commit, that no former owner committed after a later one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Stored:
    """A checkpoint as it was seen; `place` is compared as a whole, a pair as a pair."""

    at: float
    partition: int
    place: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Held:
    """A lease as it was seen: an epoch, and the owner that it was given to."""

    at: float
    partition: int
    epoch: int
    owner: str


@dataclass(frozen=True, slots=True)
class Effect:
    """When and in which epoch something was handled, by whom, and who held the lease then; None: unknown."""

    at: float
    partition: int
    epoch: int | None = None
    handler: str = ""
    holder: str | None = None
    message: str = ""


def find_moves_back(samples: Iterable[Stored]) -> list[str]:
    """Name each checkpoint that is lower than an earlier one of its partition. The samples come in order of time."""
    highest: dict[int, Stored] = {}
    found = []
    for sample in samples:
        before = highest.get(sample.partition)
        if before is not None and sample.place < before.place:
            found.append(
                f"partition {sample.partition} moved back from {before.place} to {sample.place} at {sample.at:.2f} s"
            )
        else:
            highest[sample.partition] = sample
    return found


def find_double_owners(samples: Iterable[Held]) -> list[str]:
    """Name each epoch that had two owners, and each that was seen after a later one. The samples come in order."""
    owners: dict[tuple[int, int], str] = {}
    last: dict[int, int] = {}
    found = []
    for sample in samples:
        owner = owners.setdefault((sample.partition, sample.epoch), sample.owner)
        if owner != sample.owner:
            found.append(f"epoch {sample.epoch} of partition {sample.partition} is {owner}'s and {sample.owner}'s")
        if sample.epoch < last.get(sample.partition, sample.epoch):
            found.append(
                f"epoch {sample.epoch} of partition {sample.partition} after epoch {last[sample.partition]}, "
                f"at {sample.at:.2f} s"
            )
        last[sample.partition] = max(sample.epoch, last.get(sample.partition, sample.epoch))
    return found


def find_stale_effects(effects: Iterable[Effect]) -> list[str]:
    """Name each effect that was committed after one of a later epoch, or that was not the holder's. Any order."""
    latest: dict[int, int] = {}
    found = []
    for effect in sorted(effects, key=lambda each: (each.at, each.epoch or 0)):
        if effect.epoch is None or effect.holder != effect.handler:
            found.append(
                f"partition {effect.partition} was handled by {effect.handler} while {effect.holder} held it, "
                f"at {effect.at:.2f} s"
            )
            continue
        if effect.epoch < latest.get(effect.partition, effect.epoch):
            found.append(
                f"an effect of epoch {effect.epoch} of partition {effect.partition} came after one of epoch "
                f"{latest[effect.partition]}, at {effect.at:.2f} s"
            )
        latest[effect.partition] = max(effect.epoch, latest.get(effect.partition, effect.epoch))
    return found
