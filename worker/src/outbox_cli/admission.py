"""Judges a manifest as the API server does: by the CRD's own schema, its defaults and its CEL rules.

The CRD is built from the models that it is generated from, so a checkout and an installed package have the same one.
Rules about a change (`oldSelf`) need the stored object, which only the API server has: they are left to it.
Only the rules of objects that the manifest has are compiled. Workers that the operator starts never come here.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import celpy  # of the extra `cli`, as PyYAML
from celpy.adapter import json_to_cel
from celpy.evaluation import CELEvalError

from outbox_operator.crd import build_crd

if TYPE_CHECKING:
    from collections.abc import Iterator

Body = dict[str, Any]
_TYPES: Final = {"string": str, "object": dict, "array": list, "boolean": bool}
_DATE_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)")
_METADATA: Final = ("apiVersion", "kind", "metadata")
_OBJECT_META: Final = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string"},
        "namespace": {"type": "string", "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
    },
}
"""Of every kind of object; the CRD's rules say which names a processor may have."""


def admit(body: Body) -> tuple[Body, list[str]]:
    """Return the object with the CRD's defaults, and what the API server would refuse it for; empty: it is taken.

    As there, unknown fields are told before anything else, and the rules are asked once the schema holds.
    """
    schema = _schema()
    judged = _without_nulls(copy.deepcopy(body))
    judged.pop("status", None)  # as there: a status is not taken from a manifest
    if unknown := list(_unknown_fields(schema, judged, "")):
        return judged, unknown
    _set_defaults(schema, judged)
    metadata = judged.setdefault("metadata", {})
    faults = [*_schema_faults(_OBJECT_META, metadata, "metadata"), *_schema_faults(schema, judged, "")]
    return judged, faults or list(_broken_rules(schema, judged, ""))


@cache
def _schema() -> Body:
    schema: Body = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def _without_nulls(value: Any) -> Any:
    """Drop fields that are null: no field of the resource may be, and the API server takes them for absent."""
    if isinstance(value, dict):
        return {name: _without_nulls(child) for name, child in value.items() if child is not None}
    return [_without_nulls(child) for child in value] if isinstance(value, list) else value


def _children(schema: Body, value: Any, path: str) -> Iterator[tuple[Body, Any, str]]:
    """Yield what lies in an object or list and has a schema, with its path."""
    if isinstance(value, dict):
        for name, child in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties")
            if isinstance(inner, dict) and not (path == "" and name in _METADATA):
                yield inner, child, f"{path}.{name}".lstrip(".")
    elif isinstance(value, list) and "items" in schema:
        for index, child in enumerate(value):
            yield schema["items"], child, f"{path}[{index}]"


def _unknown_fields(schema: Body, value: Any, path: str) -> Iterator[str]:
    properties = schema.get("properties")
    if isinstance(value, dict) and properties is not None:
        for name in value.keys() - properties.keys():
            near = difflib.get_close_matches(str(name), properties, 1, 0.75)
            remedy = f"did you mean {near[0]}?" if near else f"it can have {', '.join(properties)}"
            yield f'unknown field "{path}.{name}"'.replace('".', '"') + f": {remedy}"
    for inner, child, where in _children(schema, value, path):
        yield from _unknown_fields(inner, child, where)


def _set_defaults(schema: Body, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if "default" in inner and name not in value:
                value[name] = copy.deepcopy(inner["default"])
    for inner, child, _ in _children(schema, value, ""):
        _set_defaults(inner, child)


def _schema_faults(schema: Body, value: Any, path: str) -> Iterator[str]:
    if wrong := _type_fault(schema, value):
        yield f"{path or 'the manifest'}: {wrong}"
        return
    missing = [name for name in schema.get("required", ()) if name not in value] if isinstance(value, dict) else ()
    yield from (f"{path}.{name}".lstrip(".") + ": Required value: set it" for name in missing)
    yield from (f"{path}: {fault}" for fault in _bound_faults(schema, value))
    if "enum" in schema and value not in schema["enum"]:
        known = ", ".join(json.dumps(option) for option in schema["enum"])
        yield f"{path}: Unsupported value: {json.dumps(value)}: supported values: {known}"
    for inner, child, where in _children(schema, value, path):
        yield from _schema_faults(inner, child, where)


def _type_fault(schema: Body, value: Any) -> str:
    wanted = schema.get("type")
    if schema.get("x-kubernetes-int-or-string"):
        wanted, fits = "integer or string", isinstance(value, int | str) and not isinstance(value, bool)
    elif wanted in ("integer", "number"):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and (wanted == "number" or float(value).is_integer())
    else:
        fits = wanted is None or isinstance(value, _TYPES[wanted])
    return "" if fits else f"must be of type {wanted}, not {json.dumps(value, default=str)[:80]}"


def _bound_faults(schema: Body, value: Any) -> Iterator[str]:
    match value:
        case str():
            yield from _text_faults(schema, value)
        case list():
            yield from _list_faults(schema, value)
        case dict():
            if len(value) > schema.get("maxProperties", len(value)):
                yield f"has {len(value)} entries, must have at most {schema['maxProperties']}"
        case _:
            if value < schema.get("minimum", value):
                yield f"should be greater than or equal to {schema['minimum']}, not {value}"
            if value > schema.get("maximum", value):
                yield f"should be less than or equal to {schema['maximum']}, not {value}"


def _text_faults(schema: Body, value: str) -> Iterator[str]:
    if len(value) > schema.get("maxLength", len(value)):
        yield f"too long: may not be more than {schema['maxLength']} characters, has {len(value)}"
    if len(value) < schema.get("minLength", 0):
        yield f"should be at least {schema['minLength']} characters long"
    if "pattern" in schema and not re.search(schema["pattern"], value, re.ASCII):
        example = ", for example 500ms, 15s or 1m30s" if "(ms|s|m|h)" in schema["pattern"] else ""
        yield f"{json.dumps(value[:80])} should match '{schema['pattern']}'{example}"
    if schema.get("format") == "date-time" and not _is_time(value):
        yield f"must be of type date-time, for example 2026-01-01T00:00:00Z, not {json.dumps(value[:80])}"


def _is_time(text: str) -> bool:
    if not _DATE_TIME.fullmatch(text):
        return False
    try:
        datetime.fromisoformat(text.upper())
    except ValueError:
        return False
    return True


def _list_faults(schema: Body, value: list[Any]) -> Iterator[str]:
    if len(value) > schema.get("maxItems", len(value)):
        yield f"has {len(value)} items, must have at most {schema['maxItems']}"
    if len(value) < schema.get("minItems", 0):
        yield f"should have at least {schema['minItems']} items"
    kind = schema.get("x-kubernetes-list-type")
    if kind in ("set", "map"):
        names = schema.get("x-kubernetes-list-map-keys", ())
        keys = [json.dumps([item.get(name) for name in names] if kind == "map" else item) for item in value]
        yield from (f"Duplicate value: {key}" for key in sorted({key for key in keys if keys.count(key) > 1}))


def _broken_rules(schema: Body, value: Any, path: str) -> Iterator[str]:
    rules = [rule for rule in schema.get("x-kubernetes-validations", ()) if not is_about_change(rule)]
    self = json_to_cel(value) if rules else None
    for rule in rules:
        try:
            holds = bool(_program(rule["rule"]).evaluate({"self": self}))
        except CELEvalError:
            holds = False  # as there: a rule that cannot be evaluated is broken
        if not holds:
            yield f"{path}: {rule['message']}" if path else rule["message"]
    for inner, child, where in _children(schema, value, path):
        yield from _broken_rules(inner, child, where)


def is_about_change(rule: Body) -> bool:
    """Tell whether a CEL rule compares with the stored object."""
    return "oldSelf" in rule["rule"]


@cache
def _program(expression: str) -> celpy.Runner:
    environment = celpy.Environment()
    return environment.program(environment.compile(expression))
