"""What mode Competing is told by the resource."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_core.errors import ConfigurationError

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_core.spec import Competing


def settings_of(config: ProcessorConfig) -> Competing:
    """Return what mode Competing is told.

    Raises:
        ConfigurationError: nothing.

    """
    if config.delivery.competing is None:
        raise ConfigurationError("delivery.mode Competing needs delivery.competing")
    return config.delivery.competing


def lease_as_asked(config: ProcessorConfig) -> ProcessorConfig:
    """Let batches in this mode be leased for `competing.leaseDuration`; other modes stay as they are."""
    if config.delivery.competing is None:
        return config
    leased = {"lease_duration": config.delivery.competing.lease_duration}
    return config.model_copy(update={"delivery": config.delivery.model_copy(update=leased)})
