"""What becomes of an error that is kept."""

from __future__ import annotations

import gc
import weakref

from outbox_core.errors import HandlerError, OutboxError, drop_traceback


class Payload:
    """Something that a batch holds."""


def refuse(payload):
    raise RuntimeError(f"the handler refuses {payload}")


def fail(payload):
    try:
        refuse(payload)
    except RuntimeError as err:
        raise HandlerError("the handler failed", detail="its traceback") from err


def attempt(drop):
    """Keep the error in a local name, as the worker's steps do; the payload is in that frame and the handler's."""
    payload = Payload()
    watched = weakref.ref(payload)
    try:
        fail(payload)
    except OutboxError as err:
        error = err
    return drop(error), watched


def test_an_error_that_is_kept_keeps_no_batch_in_memory():
    gc.disable()
    try:
        error, watched = attempt(drop_traceback)
        assert watched() is None
        held, still = attempt(lambda each: each)
        assert still() is not None, "with its traceback it would"
    finally:
        gc.enable()
    assert str(error) == str(held) == "the handler failed"
    assert error.detail == "its traceback"
    assert isinstance(error.__cause__, RuntimeError)


def test_errors_that_name_each_other_come_to_an_end():
    first, second = OutboxError("first"), OutboxError("second")
    first.__cause__, second.__cause__ = second, first
    assert drop_traceback(first) is first
