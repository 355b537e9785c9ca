"""What every part of the resource's spec is made of: the base model, durations, names, CEL rules."""

from __future__ import annotations

import re
from collections.abc import Mapping  # noqa: TC003 - pydantic asks
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel

_DURATION_PART: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_duration(text: str | timedelta) -> timedelta:
    """Read a duration as Kubernetes writes it: `500ms`, `15s`, `1m30s`.

    Raises:
        ValueError: the text is no such duration.

    """
    if isinstance(text, timedelta):
        return text
    parts = _DURATION_PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        msg = f"{text!r} is not a duration; write for example 500ms, 15s or 1m30s"
        raise ValueError(msg)
    return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in parts))


def format_duration(value: timedelta) -> str:
    """Write a duration in whole milliseconds or seconds."""
    milliseconds = round(value.total_seconds() * 1000)
    return f"{milliseconds // 1000}s" if milliseconds % 1000 == 0 else f"{milliseconds}ms"


Duration = Annotated[
    timedelta,
    BeforeValidator(parse_duration),
    PlainSerializer(format_duration, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$", "maxLength": 32}),
]


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes as Kubernetes writes it, in mebibytes: `16Mi`.

    Raises:
        ValueError: the text is no such number.

    """
    if isinstance(text, int):
        return text
    number, unit = text[:-2], text[-2:]
    if unit != "Mi" or not number.isdecimal():
        msg = f"{text!r} is not a number of bytes in mebibytes; write for example 16Mi"
        raise ValueError(msg)
    return int(number) << 20


def format_bytes(value: int) -> str:
    """Write a number of bytes in mebibytes."""
    return f"{value >> 20}Mi"


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, return_type=str),
    WithJsonSchema({"type": "string", "pattern": r"^[1-9][0-9]{0,2}Mi$", "maxLength": 5}),
]
"""From 1Mi to 999Mi."""


def rule(condition: str, message: str, **more: str) -> dict[str, str]:
    """One CEL validation (Kubernetes `x-kubernetes-validations`), with the remedy in its message."""
    return {"rule": condition, "message": message, **more}


def between(field: str, low: str, high: str, block: str = "") -> dict[str, str]:
    """The validation that a duration lies between two others; `block`: the name of the object that it is a field of."""
    bounds = f"duration(self.{field}) >= duration('{low}') && duration(self.{field}) <= duration('{high}')"
    return rule(bounds, f"{block}{field} must be between {low} and {high}")


def rules(*each: dict[str, str]) -> dict[str, Any]:
    """CEL validations as pydantic's `json_schema_extra`."""
    return {"x-kubernetes-validations": list(each)}


class SpecModel(BaseModel):
    """Base of every spec object: camelCase outside, snake_case inside, unknown fields refused."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


_Model = TypeVar("_Model", bound=BaseModel)


def read_other_version(model: type[_Model], document: Mapping[str, Any]) -> tuple[_Model, tuple[str, ...]]:
    """Read what another version of this product wrote.

    Fields that this version does not know are left out: a newer version gives every field a default that keeps what
    was so before, and writes a field only where it is set. They are returned too, as `delivery.batchSize`.

    Raises:
        pydantic.ValidationError: a field that this version knows is wrong, or missing without those that it does not.

    """
    try:
        return model.model_validate(document), ()
    except ValidationError as err:
        unknown = [fault["loc"] for fault in err.errors() if fault["type"] == "extra_forbidden"]
        try:
            read = model.model_validate(document, extra="ignore")
        except ValidationError:
            # Without the unknown fields it says something else, or nothing: a target of a later version.
            raise err from None
        return read, tuple(".".join(str(part) for part in place) for place in unknown)


ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
ProcessorId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.:/]*)$")]
ModuleName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
SqlIdentifier = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[^%]*$")]
"""A name of PostgreSQL's. The driver reads a per cent sign in a statement as a placeholder."""


class ObjectRef(SpecModel):
    """Reference to an object in the resource's namespace."""

    name: ObjectName = Field(description="Name of the object, in the same namespace as this resource.")


class Connection(SpecModel):
    """How to connect; the Secret is mounted into the pods and never read by the operator."""

    secret_ref: ObjectRef = Field(
        description=(
            "Secret with the key `uri`, or the keys `host`, `port`, `database`, `user` and `password`; for TLS "
            "`sslmode` and `ca.crt`. RabbitMQ: `uri`, or `host`, `port`, `username`, `password` and `vhost`; for TLS "
            "an amqps URI or `ca.crt`. Other targets: as their `connection` says."
        )
    )


class Engine(StrEnum):
    """What runs the processor."""

    WORKER = "Worker"
    SPARK = "Spark"
