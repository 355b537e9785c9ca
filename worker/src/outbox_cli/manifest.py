"""Reads a manifest as `kubectl apply` would take it, and checks it as far as that goes without an API server.

The spec is read by the operator's own models. The rules that only the API server enforces (CEL, in the CRD) and that
matter where a processor runs without one are asked again here, in the same words.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from outbox_cli.errors import CommandError
from outbox_core.spec import TARGETS, Engine, Guarantee, Mode, StartType
from outbox_operator.resources import API_VERSION, KIND, Processor, ProcessorSpec, parse_processor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Manifest:
    """One processor, and the ConfigMaps that came in the same files."""

    processor: Processor
    config_maps: dict[str, dict[str, str]] = field(default_factory=dict)


def read_manifest(files: Iterable[Path], *, cluster: str, uid: str) -> Manifest:
    """Read the one OutboxProcessor in the files; `cluster` and `uid` are what an API server would add.

    Raises:
        CommandError: a file cannot be read, or it holds no valid processor, or several.

    """
    documents = [document for file in files for document in _load(file)]
    bodies = [body for body in documents if body.get("kind") == KIND]
    if len(bodies) != 1:
        raise CommandError(f"the files hold {len(bodies)} objects of kind {KIND}: give those of one processor")
    (body,) = bodies
    if body.get("apiVersion") != API_VERSION:
        raise CommandError(f"apiVersion is {body.get('apiVersion')}: this version knows {API_VERSION}")
    metadata = body.get("metadata") or {}
    if not metadata.get("name"):
        raise CommandError("metadata.name is missing")
    meta = {**metadata, "namespace": metadata.get("namespace") or "default", "uid": uid}
    try:
        processor = parse_processor({"metadata": meta, "spec": body.get("spec") or {}}, cluster)
    except ValidationError as err:
        faults = (f"spec.{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in err.errors()[:5])
        raise CommandError("; ".join(faults)) from err
    if broken := broken_rules(processor.spec):
        raise CommandError("; ".join(broken))
    config_maps = {
        found["metadata"]["name"]: found.get("data") or {}
        for found in documents
        if found.get("kind") == "ConfigMap" and (found.get("metadata") or {}).get("name")
    }
    return Manifest(processor, config_maps)


def _load(file: Path) -> list[dict[str, Any]]:
    try:
        import yaml  # of the extra `cli`; a worker's image has none
    except ImportError as err:
        raise CommandError("manifests need the package PyYAML: pip install 'outbox-operator[cli]'") from err
    try:
        documents = list(yaml.safe_load_all(file.read_text()))
    except OSError as err:
        raise CommandError(f"cannot read {file}: {err.strerror}") from err
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise CommandError(f"{file} is not YAML: {err}") from err
    found: list[dict[str, Any]] = []
    for document in documents:
        if isinstance(document, dict):
            found += document.get("items") or [] if document.get("kind") == "List" else [document]
    return found


def _targets(spec: ProcessorSpec) -> int:
    return 0 if spec.target is None else sum(getattr(spec.target, name) is not None for name in TARGETS)


def _outside_transaction(spec: ProcessorSpec) -> bool:
    return spec.target is not None and (spec.target.rabbitmq is not None or spec.target.log is not None)


def _can_swap(spec: ProcessorSpec) -> bool:
    projects = spec.target is not None and (spec.target.sql is not None or spec.target.python is not None)
    ordered = spec.engine is Engine.WORKER and spec.delivery.mode is Mode.ORDERED
    return projects and ordered and spec.delivery.guarantee is not Guarantee.AT_LEAST_ONCE


_RULES: Final[tuple[tuple[Callable[[ProcessorSpec], bool], str], ...]] = (
    (
        lambda s: s.engine is not Engine.WORKER or _targets(s) == 1,
        "spec.target: set exactly one target: " + ", ".join(TARGETS),
    ),
    (
        lambda s: s.engine is not Engine.WORKER or s.target is None or s.target.parquet is None,
        "spec.target: target.parquet needs engine: Spark",
    ),
    (
        lambda s: (s.start_from.type is StartType.POSITION) == (s.start_from.position is not None),
        "spec.startFrom: position goes with type Position: set both or neither",
    ),
    (
        lambda s: (s.start_from.type is StartType.TIMESTAMP) == (s.start_from.timestamp is not None),
        "spec.startFrom: timestamp goes with type Timestamp: set both or neither",
    ),
    (
        lambda s: (s.start_from.type is StartType.PROCESSOR) == (s.start_from.processor_id is not None),
        "spec.startFrom: processorId goes with type Processor: set both or neither",
    ),
    (
        lambda s: s.rebuild_of is None or _can_swap(s),
        "spec.rebuildOf needs engine Worker, target.sql or python, delivery.mode Ordered, guarantee Transactional",
    ),
    (
        lambda s: s.delivery.guarantee is not Guarantee.TRANSACTIONAL or not _outside_transaction(s),
        "spec.delivery: a broker or log is not part of the transaction: set guarantee: AtLeastOnce or leave it out",
    ),
    (
        lambda s: 2 <= s.delivery.lease_duration.total_seconds() <= 600,
        "spec.delivery: leaseDuration must be between 2s and 10m",
    ),
    (
        lambda s: 0.01 <= s.delivery.poll_interval.total_seconds() <= 300,
        "spec.delivery: pollInterval must be between 10ms and 5m",
    ),
    (
        lambda s: 1 <= s.delivery.timeout.total_seconds() <= 3600,
        "spec.delivery: timeout must be between 1s and 1h",
    ),
)


def broken_rules(spec: ProcessorSpec) -> list[str]:
    """Say which of the CRD's rules the spec breaks, with the remedy."""
    return [message for holds, message in _RULES if not holds(spec)]
