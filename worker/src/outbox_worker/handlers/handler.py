"""Finds the user's function: from the ConfigMap's directory, or installed in the image. Imports it again on change.

A ConfigMap that is edited appears in the running pod within a minute or so; a handler that was invalid, or that stopped
the processor, is then tried again without a restart.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
import traceback
from datetime import timedelta
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from outbox_core.errors import ConfigurationError
from outbox_core.report import Reason
from outbox_worker.postgres.errors import DatabaseError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from outbox_core.spec import PythonTarget

_DETAIL: Final = 1500
_FRAMES: Final = 12
_LOOK: Final = 0.02
"""Seconds: parts of a batch are handled faster than that, and the files are not looked at for each of them."""
Signature = tuple[tuple[str, int, int, int], ...]


def read_signature(directory: Path) -> Signature:
    """Size, time and inode of each file: a ConfigMap's update replaces the directory they are in."""
    found = []
    for path in sorted(directory.rglob("*.py")):
        try:
            status = path.stat()
        except OSError:
            continue  # it is being replaced at this moment: the next look tells
        found.append((str(path), status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)


def modules_of(directory: Path) -> dict[str, ModuleType]:
    """Return the loaded modules that came from the directory."""
    home = directory.resolve()
    return {
        name: module
        for name, module in list(sys.modules.items())
        if (file := getattr(module, "__file__", None))
        and (Path(file).is_relative_to(directory) or Path(file).resolve().is_relative_to(home))
    }


def prepare_import(directory: Path) -> None:
    """Put the directory on the path, and have all that came from it read again: helpers beside the handler too."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    for name in modules_of(directory):
        del sys.modules[name]
    importlib.invalidate_caches()


class HandlerModule:
    """A function that is imported when it is needed, and again when a file beside it changed."""

    def __init__(self, target: PythonTarget, directory: Path) -> None:
        """Keep where the ConfigMap's files are; nothing is imported yet."""
        self._target = target
        self._directory = directory
        self._seen: Signature | None = None
        self._asked = 0.0
        self._function: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        """`module.function`, as people wrote it."""
        return f"{self._target.module}.{self._target.function}"

    def changed(self) -> bool:
        """Say whether a file changed since the function was last imported, or tried to be."""
        return self._seen is not None and read_signature(self._directory) != self._seen

    def function(self) -> Callable[..., Any]:
        """Return the function, imported anew if a file changed: looked at when it was not asked for a moment ago.

        Raises:
            ConfigurationError: `HandlerInvalid`, with what to do.

        """
        now = time.monotonic()
        if self._function is not None and now - self._asked < _LOOK:
            return self._function
        self._asked = now
        if self._function is None or self.changed():
            self._seen = read_signature(self._directory)
            self._function = None
            prepare_import(self._directory)
            self._function = self._import()
        return self._function

    def _import(self) -> Callable[..., Any]:
        module = self._import_module()
        function = getattr(module, self._target.function, None)
        if function is None:
            raise _invalid(f"module {self._target.module} has no function {self._target.function}; add it, or correct "
                           "target.python.function")  # fmt: skip
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise _invalid(f"{self.name} must be an ordinary function (not async, not a value)")
        try:
            inspect.signature(function).bind("batch", "connection")
        except TypeError as err:
            raise _invalid(f"{self.name} is called as {self._target.function}(batch, connection), but: {err}") from err
        except ValueError:
            pass  # written in C without a signature: the call will tell
        return function  # type: ignore[no-any-return]

    def _import_module(self) -> ModuleType:
        try:
            return importlib.import_module(self._target.module)
        except ModuleNotFoundError as err:
            top = self._target.module.partition(".")[0]
            if err.name not in (top, self._target.module):
                raise _invalid(
                    f"module {self._target.module} imports {err.name}, which is not installed; add it to the worker's "
                    "image", describe(err, self._directory),
                ) from err  # fmt: skip
            there = ", ".join(sorted(path.stem for path in self._directory.glob("*.py"))) or "no .py file"
            source = f"the ConfigMap has {there}" if self._target.config_map_ref else "the image does not have it"
            raise _invalid(
                f"there is no module {self._target.module}: {source}; correct target.python.module or add it"
            ) from err
        except BaseException as err:
            if isinstance(err, KeyboardInterrupt):
                raise
            raise _invalid(
                f"module {self._target.module} cannot be imported: {summary(err, self._directory)}",
                describe(err, self._directory),
            ) from err


def _invalid(message: str, detail: str | None = None) -> ConfigurationError:
    return ConfigurationError(message, reason=Reason.HANDLER_INVALID, detail=detail)


def summary(error: BaseException, directory: Path, frames: list[traceback.FrameSummary] | None = None) -> str:
    """Say an exception in one line, with the user's own innermost line: `ValueError: no total (orders.py:12)`."""
    frames = _user_frames(error, directory, frames)
    own = [each for each in frames if each.filename.startswith(str(directory))] or frames
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" ({Path(error.filename).name}:{error.lineno})"
        return f"SyntaxError: {error.msg}{place}"
    return f"{_say(error)[:400]}{place}"


def describe(error: BaseException, directory: Path, frames: list[traceback.FrameSummary] | None = None) -> str:
    """Return the handler's own traceback, from its first frame on, cut to its last lines."""
    frames = _user_frames(error, directory, frames)[-_FRAMES:]
    lines = traceback.format_list(frames) if frames else []
    text = "".join(lines) + _say(error)
    return text[-_DETAIL:]


def class_names(error: BaseException) -> tuple[str, ...]:
    """Return the names by which `delivery.retry` may know an exception: SQLSTATE and its class, its own class, bases.

    `ValueError` for what Python brings along, `module.Name` and `Name` for everything else.
    """
    names = []
    for each in type(error).__mro__:
        if each is object:
            continue
        if each.__module__ != "builtins":
            names.append(f"{each.__module__}.{each.__qualname__}")
        names.append(each.__qualname__)
    if isinstance(error, DatabaseError) and error.sqlstate:
        names[:0] = [error.sqlstate, error.sqlstate[:2]]
    return tuple(names)


def asked_wait(error: BaseException) -> float | None:
    """Return the seconds that an exception asks us to wait: its attribute `retry_after`, a number or a timedelta."""
    asked = getattr(error, "retry_after", None)
    if isinstance(asked, timedelta):
        asked = asked.total_seconds()
    if isinstance(asked, bool) or not isinstance(asked, int | float) or not isfinite(asked):
        return None
    return max(0.0, float(asked))


def _say(error: BaseException) -> str:
    # psycopg appends DETAIL to an error's text, and DETAIL quotes rows: the message alone.
    said = error.diag.message_primary if isinstance(error, DatabaseError) else None
    return f"{type(error).__qualname__}: {said or str(error).strip() or '(no message)'}"


def _user_frames(
    error: BaseException, directory: Path, frames: list[traceback.FrameSummary] | None = None
) -> list[traceback.FrameSummary]:
    """Return the frames from the first that is the user's, without the worker's own."""
    found = frames if frames is not None else list(traceback.extract_tb(error.__traceback__))
    ours = str(Path(__file__).parents[1])
    theirs = [each for each in found if not (each.filename.startswith(ours) or each.filename.startswith("<frozen"))]
    inside = [index for index, each in enumerate(theirs) if each.filename.startswith(str(directory))]
    if inside:
        return theirs[inside[0] :]
    # A handler of the image: what is not the worker's, the interpreter's start or the import machinery's.
    return [each for each in theirs if "/importlib/" not in each.filename and "runpy" not in each.filename]
