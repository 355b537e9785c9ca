"""Reads a manifest as `kubectl apply` would take it, and checks it as far as that goes without an API server.

The CRD's schema, defaults and rules judge it first (`admission.py`), as the API server would; then the operator's own
models read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from outbox_cli.errors import INSTALL, CommandError
from outbox_core.plain import plain_faults
from outbox_operator.api.resources import API_VERSION, KIND, Processor, parse_processor

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Manifest:
    """One processor, and the ConfigMaps that came in the files."""

    processor: Processor
    config_maps: dict[str, dict[str, str]]


def read_manifest(files: Iterable[Path]) -> Manifest:
    """Read the one OutboxProcessor in the files."""
    found = read_manifests(files)
    if len(found) != 1:
        raise CommandError(f"the files hold {len(found)} objects of kind {KIND}: give those of one processor")
    return found[0]


def read_manifests(files: Iterable[Path], cluster: str = "") -> list[Manifest]:
    """Read each OutboxProcessor in the files; no API server has given it a uid."""
    documents = [document for file in files for document in _load(file)]
    config_maps = dict(_read_config_map(found) for found in documents if found.get("kind") == "ConfigMap")
    bodies = [body for body in documents if body.get("kind") == KIND]
    if not bodies:
        kinds = ", ".join(sorted({str(each.get("kind")) for each in documents})) or "nothing"
        raise CommandError(f"no file holds an object of kind {KIND}: found {kinds}; name the processor's file with -f")
    return [Manifest(_read_processor(body, cluster), config_maps) for body in bodies]


def _read_processor(body: dict[str, Any], cluster: str) -> Processor:
    if body.get("apiVersion") != API_VERSION:
        raise CommandError(f"apiVersion is {body.get('apiVersion')}: this version knows {API_VERSION}")
    admitted = _admit(body)
    meta = {"namespace": "default", **admitted["metadata"], "uid": ""}
    try:
        # No pods are made of it here, so it may ask for any.
        return parse_processor({"metadata": meta, "spec": admitted["spec"]}, cluster, unrestricted=True)
    except ValidationError as err:
        raise CommandError(plain_faults(err.errors(), "spec")) from err


def _read_config_map(body: dict[str, Any]) -> tuple[str, dict[str, str]]:
    metadata, data = body.get("metadata"), body.get("data") or {}
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(data, dict) or not all(isinstance(each, str) for each in (name, *data, *data.values())):
        raise CommandError("a ConfigMap needs metadata.name, and in data a text for each file")
    return str(name), data


def _admit(body: dict[str, Any]) -> dict[str, Any]:
    """Return the object with defaults, once the CRD admits it."""
    try:
        from outbox_cli.admission import admit  # needs a package that a worker's image has not
    except ImportError as err:
        raise CommandError(f"manifests need the package cel-python: {INSTALL}") from err
    admitted, faults = admit(body)
    if faults:
        raise CommandError("; ".join(faults[:5]))
    return admitted


def _load(file: Path) -> list[dict[str, Any]]:
    try:
        import yaml  # of the extra `cli`; a worker's image has none
    except ImportError as err:
        raise CommandError(f"manifests need the package PyYAML: {INSTALL}") from err
    try:
        documents = list(yaml.load_all(file.read_text(), _json_loader(yaml)))
    except OSError as err:
        raise CommandError(f"cannot read {file}: {err.strerror}") from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise CommandError(f"{file} is not YAML: {err}") from err
    except RecursionError as err:
        raise CommandError(f"{file} cannot be read: it is nested too deep") from err
    found: list[Any] = []
    for document in documents:
        listed = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else [document]
        found += listed if isinstance(listed, list) else []
    return [each for each in found if isinstance(each, dict)]


def _json_loader(yaml: Any) -> Any:
    """Return a safe loader that leaves times as text, as kubectl does: JSON has no type for them.

    It refuses a key that stands twice in a mapping: of two, one would be left out without a word.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # a class of a package that is imported late
        yaml_implicit_resolvers = {  # noqa: RUF012  # the base class's own shape
            first: [found for found in resolvers if found[0] != "tag:yaml.org,2002:timestamp"]
            for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor: Any) -> Any:
            node = super().compose_mapping_node(anchor)
            seen = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        raise yaml.composer.ComposerError(
                            "while reading a mapping", node.start_mark,
                            f"found the key {key.value} a second time: join both into one", key.start_mark,
                        )  # fmt: skip
                    seen.add(key.value)
            return node

    return Loader
