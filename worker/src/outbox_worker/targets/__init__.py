"""Where messages go: one module for each target, imported only by a worker that has it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from outbox_core.errors import ConfigurationError
from outbox_core.spec import TARGETS, Engine, Guarantee, Mode

if TYPE_CHECKING:
    from outbox_core.config import ProcessorConfig
    from outbox_core.ports import Target
    from outbox_worker.settings import Settings

_KINDS: Final = [kind for kind in TARGETS if Engine.WORKER in kind.engines]


def build_target(config: ProcessorConfig, settings: Settings) -> Target:
    """Build the target that the resource names.

    Raises:
        ConfigurationError: no target of the worker's is named, or it cannot give the guarantee asked for.

    """
    if config.target is None or config.target.kind not in _KINDS:
        raise ConfigurationError(
            f"set one of {', '.join(kind.path for kind in _KINDS)}: the worker has no other target"
        )
    kind = config.target.kind
    if config.guarantee is Guarantee.TRANSACTIONAL and not kind.transactional:
        if not kind.own_transactions:
            able = " or ".join(each.name for each in _KINDS if each.transactional or each.own_transactions)
            raise ConfigurationError(
                "delivery.guarantee Transactional needs a target in the source's database, or one with transactions of "
                f"its own: {able}"
            )
        if config.delivery.mode is Mode.COMPETING:
            raise ConfigurationError(
                f"{kind.path} with delivery.guarantee Transactional needs mode Ordered or Partitioned: consumers in "
                "mode Competing have no epoch by which one could be shut out"
            )
    module = importlib.import_module(f"{__name__}.{kind.attribute}")
    target: Target = module.build(config.target.chosen, config, settings)
    return target
