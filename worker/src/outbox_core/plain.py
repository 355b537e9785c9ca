"""Says in a sentence what pydantic and argparse say in their own words: what is wrong, where, and what to write.

Pydantic's faults are handed over as it lists them (`ValidationError.errors()`); argparse calls the readers below for
its options, and prints what they raise behind the option's name.
"""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any, Final

from outbox_core.progress.checkpoint import END, MAX_POSITION

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

AT_MOST: Final = 5
"""Faults that one message names."""
_KINDS: Final = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object with fields",
    "model": "an object with fields",
    "datetime": "a time such as 2026-01-01T00:00:00Z",
}


def plain_faults(faults: Iterable[Mapping[str, Any]], root: str = "") -> str:
    """Write the first faults of a `ValidationError` as one sentence each; `root` goes before each field's name."""
    return "; ".join(plain_fault(fault, root) for fault in list(faults)[:AT_MOST])


def plain_fault(fault: Mapping[str, Any], root: str = "") -> str:
    """Write one fault: the field, and what it must be."""
    where = ".".join(str(part) for part in (root, *fault["loc"]) if part != "") or "the document"
    return f"{where}: {_sentence(fault, fault.get('ctx') or {})}"


def _sentence(fault: Mapping[str, Any], context: Mapping[str, Any]) -> str:
    kind, given = str(fault["type"]), _shown(fault["input"])
    sentences = {
        "extra_forbidden": "this version has no such field; correct its name or remove it",
        "missing": "is missing; set it",
        "enum": f"must be {context.get('expected')}, not {given}",
        "literal_error": f"must be {context.get('expected')}, not {given}",
        "string_pattern_mismatch": f"{given} does not match {context.get('pattern')}",
        "value_error": str(context.get("error")),
        "json_invalid": f"is not JSON: {context.get('error')}",
    }
    if kind in sentences:
        return sentences[kind]
    wanted = _KINDS.get(kind.partition("_")[0])
    if wanted is not None and kind.endswith(("_type", "_parsing", "_from_float")):
        return f"must be {wanted}, not {given}"
    said = str(fault["msg"]).removeprefix("Input ").removeprefix("String ").removeprefix("List ")
    return f"{said}, not {given}"


def plain_checkpoints(text: str) -> str:
    """Write `5929:end` for a checkpoint behind every position of its transaction id; `parse_checkpoint` reads it."""
    return text.replace(f":{MAX_POSITION}", f":{END}")


def plain_count(number: int, one: str, many: str | None = None) -> str:
    """Write a number with what it counts: `1 pod`, `2 pods`; `many` where that is not `one` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def _shown(value: object) -> str:
    """Show what was given, cut; a whole object says nothing to a person."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return json.dumps(value, default=str)[:80]


def whole_number(text: str) -> int:
    """Read an option that is a whole number of either sign.

    Raises:
        argparse.ArgumentTypeError: it is none.

    """
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write for example 100") from None


def natural_number(text: str) -> int:
    """Read an option that is a whole number of 0 or more.

    Raises:
        argparse.ArgumentTypeError: it is none.

    """
    number = whole_number(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is below 0; write 0 or more")
    return number


def number_of_seconds(text: str) -> float:
    """Read an option in seconds, 0 or more.

    Raises:
        argparse.ArgumentTypeError: it is no such number.

    """
    number = _finite(text, "seconds; write for example 60 or 0.5")
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0; write 0 or more seconds")
    return number


def number_each_second(text: str) -> float:
    """Read an option that limits how many there are in a second: more than 0.

    Raises:
        argparse.ArgumentTypeError: it is no such number.

    """
    number = _finite(text, "messages a second; write for example 100 or 0.5")
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0; write for example 100 or 0.5")
    return number


def port_number(text: str) -> int:
    """Read an option that is a TCP port; 0 lets the system choose.

    Raises:
        argparse.ArgumentTypeError: it is none.

    """
    number = whole_number(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{number} is not a port; write 0 to 65535")
    return number


def _finite(text: str, what: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what}")
    return number
