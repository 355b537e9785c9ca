"""PURE: says once what a part of an object may be; asks it in Python, and writes it as CEL for the API server.

A shape lists what is allowed; everything else is a violation. A violation is one sentence: the field's path, and what
to do. Both forms find the same violations with the same words; only their order may differ, because a CEL map has none.
`pod_rules.py` has the shapes that are used, `admission.py` puts the CEL into a ValidatingAdmissionPolicy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SEPARATOR: Final = "; "
SECRETS: Final = "variables.secrets"
"""In CEL: the Secrets that the resource names."""
OWN: Final = "template.own"
"""In CEL: the name of the operator's own container."""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a violation depends on beside the value."""

    own: str = ""
    """Name of the container that the operator makes."""
    secrets: frozenset[str] = frozenset()
    """Names of the Secrets that the resource names as connections."""


class Shape(Protocol):
    """What a value may be."""

    def violations(self, value: Any, path: str, scope: Scope) -> Iterator[str]:
        """Find what is not allowed in a value that stands at `path`."""

    def cel(self, value: str, path: str, depth: int = 0) -> str:
        """Write the same as CEL: an expression of the violations, joined; the empty string when there are none.

        Args:
            value: CEL expression of the value.
            path: CEL expression of its path; it ends with a string literal.
            depth: of nested lists, so that each has a variable of its own.

        """


def literal(value: Any) -> str:
    """Write a value as a CEL literal."""
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(literal(item) for item in value) + "]"
    return json.dumps(value)


def _then(path: str, text: str) -> str:
    """Append text to a CEL expression that ends with a string literal."""
    return path[:-1] + literal(text)[1:]


def _joined(texts: str) -> str:
    return f"{texts}.filter(text, text != '').join({literal(SEPARATOR)})"


@dataclass(frozen=True, slots=True)
class Leaf(Shape):
    """A value with a condition of its own, in both languages."""

    holds: Callable[[Any, Scope], bool]
    condition: str
    """The same in CEL; `{}` stands for the value."""
    remedy: str
    """What a person reads when it does not hold."""

    @override
    def violations(self, value: Any, path: str, scope: Scope) -> Iterator[str]:
        if not self.holds(value, scope):
            yield f"{path}: {self.remedy}"

    @override
    def cel(self, value: str, path: str, depth: int = 0) -> str:
        return f"({self.condition.replace('{}', value)} ? '' : {_then(path, f': {self.remedy}')})"


def only(allowed: bool | int | str) -> Leaf:
    """Allow one value."""
    said = allowed if isinstance(allowed, str) else json.dumps(allowed)
    return Leaf(
        lambda value, _: type(value) is type(allowed) and value == allowed,
        f"{{}} == {literal(allowed)}",
        f"must be {said}",
    )


@dataclass(frozen=True, slots=True)
class Fields(Shape):
    """An object."""

    allowed: Mapping[str, Shape | None]
    """Its fields with their shapes; None allows anything there."""
    instead: Mapping[str, str] = field(default_factory=dict)
    """What to do in place of a field that is not allowed; the others are to be removed."""
    required: Mapping[str, str] = field(default_factory=dict)
    """Fields that must be there, with what to set."""
    closed: bool = True
    """Whether fields that are not listed are refused."""
    nullable: bool = False
    """Whether null may stand for it: it removes what the operator set."""

    @override
    def violations(self, value: Any, path: str, scope: Scope) -> Iterator[str]:
        if value is None and self.nullable:
            return
        if not isinstance(value, dict):
            yield f"{path}: must be an object"
            return
        if self.closed:
            for name in sorted(value.keys() - self.allowed.keys()):
                yield f"{path}.{name}: is not allowed, {self.instead.get(name, 'remove it')}"
        yield from (f"{path}.{name}: is missing, {what}" for name, what in self.required.items() if name not in value)
        for name, shape in self.allowed.items():
            if shape is not None and name in value:
                yield from shape.violations(value[name], f"{path}.{name}", scope)

    @override
    def cel(self, value: str, path: str, depth: int = 0) -> str:
        parts = [
            f"(has({value}.{name}) ? '' : {_then(path, f'.{name}: is missing, {what}')})"
            for name, what in self.required.items()
        ]
        parts += [
            f"(has({value}.{name}) ? {shape.cel(f'{value}.{name}', _then(path, f'.{name}'), depth)} : '')"
            for name, shape in self.allowed.items()
            if shape is not None
        ]
        texts = f"[{', '.join(parts)}]"
        if self.closed:
            texts = f"({self._unknown(value, path)} + {texts})"
        null = f"{value} == null ? '' : " if self.nullable else ""
        return f"({null}type({value}) != map ? {_then(path, ': must be an object')} : {_joined(texts)})"

    def _unknown(self, value: str, path: str) -> str:
        remedy = "'remove it'"
        for name, what in self.instead.items():
            remedy = f"name == {literal(name)} ? {literal(what)} : {remedy}"
        message = f"{_then(path, '.')} + name + ': is not allowed, ' + ({remedy})"
        return f"{value}.filter(name, !(name in {literal(list(self.allowed))})).map(name, {message})"


def fields(*free: str, **shaped: Shape | None) -> Fields:
    """Allow some fields to be anything, and others of a shape."""
    return Fields({**dict.fromkeys(free), **shaped})


@dataclass(frozen=True, slots=True)
class Items(Shape):
    """A list; its items go by their field `name` in paths, if `named`."""

    shape: Shape
    named: bool = True

    @override
    def violations(self, value: Any, path: str, scope: Scope) -> Iterator[str]:
        if not isinstance(value, list):
            yield f"{path}: must be a list"
            return
        for item in value:
            if not self.named:
                yield from self.shape.violations(item, f"{path}[]", scope)
            elif isinstance(item, dict) and isinstance(item.get("name"), str):
                yield from self.shape.violations(item, f"{path}[{item['name']}]", scope)
            else:
                yield f"{path}[]: must be an object with a name"

    @override
    def cel(self, value: str, path: str, depth: int = 0) -> str:
        item = f"item{depth}"
        if self.named:
            inner = self.shape.cel(item, f"{_then(path, '[')} + {item}.name + ']'", depth + 1)
            is_named = f"type({item}) == map && has({item}.name) && type({item}.name) == string"
            inner = f"({is_named} ? {inner} : {_then(path, '[]: must be an object with a name')})"
        else:
            inner = self.shape.cel(item, _then(path, "[]"), depth + 1)
        texts = f"{value}.map({item}, {inner})"
        return f"(type({value}) != list ? {_then(path, ': must be a list')} : {_joined(texts)})"


@dataclass(frozen=True, slots=True)
class Keys(Shape):
    """An object whose fields are free, but for some prefixes: labels, annotations, settings."""

    refused: Mapping[str, str]
    """Prefixes of keys that are not allowed, with what to do."""
    but: tuple[str, ...] = ()
    """Prefixes of keys that are allowed all the same."""

    @override
    def violations(self, value: Any, path: str, scope: Scope) -> Iterator[str]:
        if not isinstance(value, dict):
            yield f"{path}: must be an object"
            return
        for key in sorted(value):
            for prefix, remedy in self.refused.items():
                if key.startswith(prefix) and not key.startswith(self.but):
                    yield f"{path}[{key}]: {remedy}"

    @override
    def cel(self, value: str, path: str, depth: int = 0) -> str:
        but = "".join(f" && !key.startsWith({literal(prefix)})" for prefix in self.but)
        text = "''"
        for prefix, remedy in self.refused.items():
            found = f"{_then(path, '[')} + key + {literal(f']: {remedy}')}"
            text = f"key.startsWith({literal(prefix)}){but} ? {found} : {text}"
        texts = f"{value}.map(key, {text})"
        return f"(type({value}) != map ? {_then(path, ': must be an object')} : {_joined(texts)})"


@dataclass(frozen=True, slots=True)
class OwnOrOther(Shape):
    """A container: the operator's own, which is laid over, or one that is added."""

    own: Shape
    other: Shape

    @override
    def violations(self, value: Any, path: str, scope: Scope) -> Iterator[str]:
        shape = self.own if value.get("name") == scope.own else self.other
        return shape.violations(value, path, scope)

    @override
    def cel(self, value: str, path: str, depth: int = 0) -> str:
        return f"({value}.name == {OWN} ? {self.own.cel(value, path, depth)} : {self.other.cel(value, path, depth)})"
