"""Each call of a function of the schema fits the function's text, and each statement of ours is used."""

from __future__ import annotations

import ast
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from outbox_worker.postgres.call import _compose, load_all
from outbox_worker.postgres.key import ProcessorKey

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
SOURCES = ROOT / "worker/src"
CALLS = {"call", "call_row", "call_rows", "compose_call"}
MODULES = {path: ast.parse(path.read_text()) for path in SOURCES.rglob("*.py")}
FUNCTION = re.compile(r'CREATE OR REPLACE FUNCTION :"schema"\.(\w+)\((.*?)\)\s+(?:RETURNS|LANGUAGE)', re.DOTALL)
CALLED_IN_TEXT = re.compile(r"\{(?:schema|)\}\.(\w+)\(")


@dataclass(frozen=True)
class Signature:
    """The names of a function's arguments, and of those without a default."""

    names: frozenset[str]
    required: frozenset[str]

    def takes(self, names: frozenset[str]) -> bool:
        return self.required <= names <= self.names


class Anything:
    """Stands for a value that a test does not know."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self) -> Anything:
        return self

    def __iter__(self) -> Iterator[Anything]:
        return iter(())


class Locals(dict[str, Any]):
    """What an expression sees: the names of its module, and for the names of its function anything."""

    def __missing__(self, name: str) -> object:
        return Anything()


def signatures() -> dict[str, list[Signature]]:
    found: dict[str, list[Signature]] = {}
    for file in sorted((ROOT / "sql/functions").glob("*.sql")):
        for name, listed in FUNCTION.findall(file.read_text()):
            arguments = [each.split() for each in re.findall(r"\bp_\w+ [^,]*", listed)]
            found.setdefault(name, []).append(
                Signature(
                    frozenset(words[0] for words in arguments),
                    frozenset(words[0] for words in arguments if "DEFAULT" not in words),
                )
            )
    return found


def calls() -> Iterator[tuple[str, Path, ast.Call]]:
    for path, tree in MODULES.items():
        if path.name == "call.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS:
                yield f"{path.name}:{node.lineno}", path, node


def argument_names(path: Path, node: ast.Call) -> frozenset[str]:
    """Return the arguments' names as SQL has them; `**` must be an expression that needs no other statement."""
    module = importlib.import_module(".".join(path.relative_to(SOURCES).with_suffix("").parts))
    seen = Locals(vars(module), key=ProcessorKey("outbox", "shop"))
    names: set[str] = set()
    for keyword in node.keywords:
        if keyword.arg is not None:
            names.add(keyword.arg)
        else:
            names |= set(eval(compile(ast.Expression(keyword.value), str(path), "eval"), {}, seen))
    return frozenset(f"p_{name}" for name in names)


FOUND = list(calls())


@pytest.mark.parametrize(("path", "node"), [pytest.param(path, node, id=place) for place, path, node in FOUND])
def test_a_call_names_a_function_and_its_arguments(path: Path, node: ast.Call):
    function: str = ast.literal_eval(node.args[-1])
    there = signatures().get(function)
    assert there, f"no function in sql/functions is called {function}"
    names = argument_names(path, node)
    assert any(each.takes(names) for each in there), f"{function} takes {there}, not {sorted(names)}"


def test_the_calls_are_found():
    assert len(FOUND) > 40
    assert {len(node.args) for _, _, node in FOUND} == {2, 3}, (
        "a call composed for another statement names no connection"
    )


def test_functions_that_statements_call_are_there():
    texts = [*load_all().values(), *(path.read_text() for path in MODULES)]
    called = {name for text in texts for name in CALLED_IN_TEXT.findall(text)}
    assert called - signatures().keys() == set()


def test_each_statement_is_used():
    sources = "".join(path.read_text() for path in MODULES)
    assert [name for name in load_all() if f'"{name}"' not in sources] == []


def test_a_call_is_one_text_with_named_arguments():
    statement = _compose('shop "a"', "renew_lease", ("processor_id", "epoch"))
    assert statement.as_string(None) == (
        'SELECT * FROM "shop ""a"""."renew_lease"("p_processor_id" => %(processor_id)s, "p_epoch" => %(epoch)s)'
    )
    assert _compose('shop "a"', "renew_lease", ("processor_id", "epoch")) is statement
