"""PURE: which of the published messages the broker has answered for. Delivery tags count from 1 for each channel."""

from __future__ import annotations

from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Final

from outbox_worker.targets.amqp.encoder import CHANNEL

if TYPE_CHECKING:
    from collections.abc import Container

_FRAME: Final = Struct(">BHIHHQBB")
_ACK: Final = (1, CHANNEL, 13, 60, 80)
"""A method's frame, its channel and length, and `basic.ack`."""
_FRAME_END: Final = 0xCE


def read_ack(data: bytes, start: int, end: int) -> tuple[int, bool] | None:
    """Read a frame that is an ack, which the library takes 3 us for: its tag, and whether it is for all before it too.

    None: it is another frame.
    """
    if end - start != _FRAME.size:
        return None
    *begins, tag, bits, ends = _FRAME.unpack_from(data, start)
    return (tag, bool(bits & 1)) if tuple(begins) == _ACK and ends == _FRAME_END else None


@dataclass(slots=True)
class ConfirmTracker:
    """Publisher confirms of one channel: every tag is answered once, alone or in a `multiple` up to a tag."""

    last: int = 0
    """The latest tag given out."""
    _lowest: int = 1
    """Every tag below is answered."""
    _answered: set[int] = field(default_factory=set)
    """Answered ones from `_lowest` on."""
    nacked: list[int] = field(default_factory=list)
    """Tags that the broker refused, until `forget_nacked`."""

    def publish(self, count: int) -> int:
        """Give out the tags of the next messages; return the first."""
        self.last += count
        return self.last - count + 1

    def are_answered(self, last: int) -> bool:
        """Say whether every tag up to this one is answered."""
        return last < self._lowest

    def is_accepted(self, tag: int) -> bool:
        """Say whether the broker acknowledged this tag. Not after `forget_nacked`."""
        return (tag < self._lowest or tag in self._answered) and tag not in self.nacked

    def answer(self, tag: int, *, multiple: bool, accepted: bool) -> None:
        """Take an ack or nack; 0 with `multiple` means all.

        Raises:
            ValueError: a tag that was never given out: the two sides do not talk about the same channel.

        """
        top = self.last if multiple and tag == 0 else tag
        if not 0 < top <= self.last:
            msg = f"the broker confirmed delivery tag {tag}; the last one published is {self.last}"
            raise ValueError(msg)
        tags = range(self._lowest if multiple else max(top, self._lowest), top + 1)
        if not accepted:
            self.nacked += (each for each in tags if each not in self._answered)
        if tags.start == self._lowest:  # all up to there: no set is needed for them
            self._answered.difference_update(tags if self._answered else ())
            self._lowest = max(self._lowest, top + 1)
        else:
            self._answered.update(tags)
        while self._lowest in self._answered:
            self._answered.remove(self._lowest)
            self._lowest += 1

    def forget_nacked(self, tags: Container[int]) -> None:
        """Forget which of these tags were refused: it is written down elsewhere."""
        self.nacked = [tag for tag in self.nacked if tag not in tags]
