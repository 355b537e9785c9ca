"""Target `log`: one JSON line for each message on standard output. AtLeastOnce."""

from __future__ import annotations

import json
import sys
from errno import EAGAIN
from typing import TYPE_CHECKING

from typing_extensions import override

from outbox_core.errors import ConfigurationError, TransientError
from outbox_core.ports import OutsideTransaction
from outbox_core.report import Reason

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_core.message import Batch, Message
    from outbox_core.spec import LogTarget
    from outbox_worker.settings import Settings


class LogSink(OutsideTransaction):
    """Writes lines; there is nothing to open."""

    def __init__(self, target: LogTarget) -> None:
        self._payload = target.payload
        self._is_cut = False
        """The last line that went out may have no end."""

    @override
    def check(self) -> None:
        """Look whether this process has an output at all.

        Raises:
            ConfigurationError: it was started with standard output closed.

        """
        if sys.stdout is None:
            raise ConfigurationError(
                "target.log prints messages, and standard output of this process is closed: start it with standard "
                "output open, or send that to a file"
            )

    @override
    def deliver(self, batch: Batch, epoch: int) -> int:
        """Print the batch and flush, so that a line is out before its checkpoint is stored."""
        lines = "".join(self._line(message, epoch) for message in batch)
        left = memoryview(("\n" + lines if self._is_cut else lines).encode(errors="replace"))
        out, self._is_cut = sys.stdout.buffer, True
        try:
            while left:  # unbuffered, as in the image, the output may take a part: a full disk, a signal
                written = out.write(left)
                if written is None:
                    raise BlockingIOError(EAGAIN, "it is full, and its reader does not read")
                left = left[written:]
            out.flush()
        except OSError as err:
            raise TransientError(
                f"standard output cannot be written ({err.strerror}); it is tried again until it can be",
                reason=Reason.TARGET_UNAVAILABLE,
            ) from err
        self._is_cut = False
        return len(batch)

    def _line(self, message: Message, epoch: int) -> str:
        line: dict[str, object] = {
            "level": "info",
            "logger": "outbox.message",
            "checkpoint": message.pair,
            "messageId": message.message_id,
            "messageType": message.message_type,
            "publicationId": message.publication_id,
            "partitionKey": message.partition_key,
            "scheduled": None if message.scheduled is None else message.scheduled.isoformat(),
            "epoch": epoch,
        }
        if self._payload:
            try:
                line["data"] = message.json()
            except ValueError:
                line["data"] = message.data  # an outbox whose payload is text
        return json.dumps(line, ensure_ascii=False) + "\n"


def build(target: LogTarget, config: ProcessorConfig, settings: Settings) -> LogSink:
    """Build the target."""
    del config, settings
    return LogSink(target)
