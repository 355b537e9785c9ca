"""PURE: reads a person's decision about a conflict from the resource's annotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_core.config import Resolution, ResolutionAction
from outbox_core.progress.checkpoint import parse_checkpoint
from outbox_operator.api.resources import ACCEPT_ANNOTATION, REWIND_ANNOTATION

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class Decided:
    """A person's annotation, read."""

    annotation: str
    resolution: Resolution | None
    error: str | None


def read_resolution(annotations: Mapping[str, str], conflict: int | None = None) -> Decided | None:
    """Read the annotation that decides an open conflict; None when there is none.

    Of two the one about `conflict`, the open one: what is left of a former decision hides no new one. Two about it, or
    an unreadable one, are an error for a person to see, and decide nothing.
    """
    kinds = ((ACCEPT_ANNOTATION, ResolutionAction.ACCEPT), (REWIND_ANNOTATION, ResolutionAction.REWIND))
    found = [_read(name, action, annotations[name]) for name, action in kinds if name in annotations]
    about = [one for one in found if one.resolution is not None and one.resolution.conflict_id == conflict]
    if len(about) > 1:
        names = " and ".join(one.annotation for one in about)
        return Decided(about[0].annotation, None, f"{names} both decide conflict {conflict}: remove one of them")
    readable = [one for one in found if one.resolution is not None]
    return next(iter((*about, *readable, *found)), None)


def _read(annotation: str, action: ResolutionAction, text: str) -> Decided:
    number, _, pair = text.partition("=")
    try:
        resolution = Resolution(
            conflict_id=int(number), action=action, pair=str(parse_checkpoint(pair)), decided_by=annotation
        )
    except ValueError:
        error = f"{annotation}: {text[:100]!r} must be CONFLICT=TRANSACTION_ID:POSITION, for example 7=815:42"
        return Decided(annotation, None, error)
    return Decided(annotation, resolution, None)
