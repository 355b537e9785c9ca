"""The user's PySpark code: finding it, and saying what is wrong with it.

A module has one of two functions. `transform(messages) -> rows` is given the streaming DataFrame of messages; its
result goes to the processor's target. `handle(messages, effects)` is given one micro-batch and says itself what is
written, with `effects.sql` and `effects.parquet` (effects.py).
"""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark import cloudpickle

from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason
from outbox_worker.handlers.handler import modules_of, prepare_import

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from outbox_core.config import ProcessorConfig


@dataclass(frozen=True, slots=True)
class UserApplication:
    """What the user's module offers; both None when the processor has only a target."""

    transform: Callable[..., Any] | None = None
    handle: Callable[..., Any] | None = None


def load_application(config: ProcessorConfig, handler_path: Path) -> UserApplication:
    """Import the user's module, afresh each time, so that a corrected one is seen.

    Code from the ConfigMap, mounted at `handler_path`, travels to the executors inside the tasks; code in the image is
    imported there.

    Raises:
        ConfigurationError: there is no such module or function, its import fails, or it does not go with the target.

    """
    application = config.plan.application
    if application is None:
        if config.target is None:
            raise ConfigurationError("nothing to do: give spec.target, or spec.spark.application")
        return UserApplication()
    module = _import(application.module, handler_path)
    transform, handle = (getattr(module, name, None) for name in ("transform", "handle"))
    found = UserApplication(transform if callable(transform) else None, handle if callable(handle) else None)
    _check(found, application.module, has_target=config.target is not None)
    return found


def _import(name: str, handler_path: Path) -> ModuleType:
    prepare_import(handler_path)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(
                f"there is no module {name!r} in this image, nor in the ConfigMap of spark.application.configMapRef: "
                f"build an image with it and name it in spark.image, or put a key {name}.py into the ConfigMap",
                reason=Reason.APPLICATION_MISSING,
            ) from error
        raise _broken(name, error) from error
    except Exception as error:
        raise _broken(name, error) from error
    for loaded in modules_of(handler_path).values():
        cloudpickle.register_pickle_by_value(loaded)  # type: ignore[no-untyped-call]
    return module


def _broken(name: str, error: Exception) -> ConfigurationError:
    lines = "".join(traceback.format_exception(error)[-3:]).strip()
    return ConfigurationError(f"module {name!r} cannot be imported: {lines}", reason=Reason.HANDLER_INVALID)


def _check(found: UserApplication, name: str, *, has_target: bool) -> None:
    reason = Reason.HANDLER_INVALID
    match found.transform is not None, found.handle is not None, has_target:
        case False, False, _:
            reason = Reason.APPLICATION_MISSING
            fault = "neither transform(messages) nor handle(messages, effects): define one of them"
        case True, True, _:
            fault = "both transform and handle: keep one"
        case True, False, False:
            fault = "transform, but no target takes its result: give spec.target, or define handle"
        case False, True, True:
            fault = "handle, which says what is written: leave out spec.target, or define transform"
        case _:
            return
    raise ConfigurationError(f"module {name!r} has {fault}", reason=reason)
