"""What a worker process is told: command line, environment, and the configuration file that the operator writes."""

from __future__ import annotations

import argparse
import json
import logging
import socket
import uuid
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from outbox_core.config import CONFIG_PATH, CONNECTIONS_PATH, HANDLER_PATH, KEY_PATH, ProcessorConfig
from outbox_core.errors import ConfigurationError
from outbox_core.plain import plain_faults, port_number
from outbox_core.report import STATUS_PORT, TERMINATION_LOG
from outbox_core.spec import read_other_version

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_log = logging.getLogger(__name__)
_GRACE_SECONDS = 30.0
_IDENTITY_NAMESPACE = uuid.UUID("6f1f2a52-6d0d-5d0e-9a51-0b2f0d3b8f10")


class Act(StrEnum):
    """What the process is for."""

    RUN = "run"
    TRY_CLAIM = "try-claim"
    RELEASE_CLAIM = "release-claim"
    HAND_OVER = "hand-over"


@dataclass(frozen=True, slots=True)
class Settings:
    """One process's settings; outside a cluster `pod_uid` and `pod` are inventions.

    An empty `host` is every address. `source` and `target` hold the files of the two connections.
    """

    act: Act
    take_over: bool
    processors: Path | None
    config: Path
    connections: Path
    source: Path
    target: Path
    handler: Path
    key: Path
    metrics_hash: str
    termination_log: Path
    cluster_id: str | None
    hand_over: tuple[str, str, str] | None
    host: str
    port: int
    pod: str
    pod_uid: str
    grace_seconds: float
    log_level: str


def read_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read command line and environment; argparse ends the process for a wrong line."""
    parser = _parser(environment)
    given = parser.parse_args(arguments)
    log_level = environment.get("OUTBOX_LOG_LEVEL", "INFO").upper()
    if log_level not in (known := logging.getLevelNamesMapping()):
        parser.error(f"OUTBOX_LOG_LEVEL is {log_level}: it can be {', '.join(known)}")
    if given.hand_over is not None:
        given.act = Act.HAND_OVER
    grace = environment.get("OUTBOX_GRACE_SECONDS", "")
    return Settings(
        **vars(given),
        source=given.connections / "source",
        target=given.connections / "target",
        metrics_hash=environment.get("OUTBOX_METRICS_TOKEN_SHA256", ""),
        pod=environment.get("POD_NAME") or socket.gethostname(),
        pod_uid=environment.get("POD_UID") or str(uuid.uuid4()),
        grace_seconds=float(grace) if grace.replace(".", "", 1).isdecimal() else _GRACE_SECONDS,
        log_level=log_level,
    )


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m outbox_worker", description="Run an outbox processor, or several, until SIGTERM."
    )
    acts = parser.add_mutually_exclusive_group()
    for act, what in (
        (Act.TRY_CLAIM, "ask for the claim once: exit 0 if ours, 10 if held"),
        (Act.RELEASE_CLAIM, "give the resource's claim up and exit"),
    ):
        acts.add_argument(f"--{act}", action="store_const", dest="act", const=act, default=Act.RUN, help=what)
    acts.add_argument(
        "--hand-over",
        type=_place,
        metavar="CLUSTER/NAMESPACE/NAME",
        help="give the resource's claim to that resource and exit: 0 if it has it, 10 if the claim is another's",
    )
    acts.add_argument(
        "--take-over", action="store_true", help="run, and first take claim and lease by force from their holders"
    )
    parser.add_argument(
        "--processors",
        type=Path,
        help="directory with the JSON files of several processors; --connections has a directory for each Secret then",
    )
    parser.add_argument("--config", type=Path, default=CONFIG_PATH, help="the processor's JSON file (%(default)s)")
    parser.add_argument(
        "--connections", type=Path, default=CONNECTIONS_PATH, help="directory with source/ and target/ (%(default)s)"
    )
    parser.add_argument("--handler", type=Path, default=HANDLER_PATH, help="directory of Python files (%(default)s)")
    parser.add_argument(
        "--key", type=Path, default=KEY_PATH, help="the key of those who may ask for status, if it exists (%(default)s)"
    )
    parser.add_argument(
        "--cluster-id", help="instead of the configuration's cluster: this process is another resource there"
    )
    parser.add_argument("--host", default="", help="address to serve HTTP on; absent: every one of the machine")
    parser.add_argument(
        "--port",
        type=port_number,
        default=environment.get("OUTBOX_STATUS_PORT") or STATUS_PORT,
        help="HTTP port; 0: any",
    )
    parser.add_argument("--termination-log", type=Path, default=Path(TERMINATION_LOG), help="written if it exists")
    return parser


def _place(text: str) -> tuple[str, str, str]:
    # A cluster's name may hold slashes (an ARN); namespaces and names cannot.
    parts = text.rsplit("/", 2)
    if len(parts) != 3 or not all(parts):
        raise argparse.ArgumentTypeError("write it as CLUSTER/NAMESPACE/NAME")
    return parts[0], parts[1], parts[2]


def read_processors(settings: Settings) -> list[tuple[Settings, ProcessorConfig]]:
    """Read each processor of this process; of several, one that cannot be read leaves the others alone.

    Raises:
        ConfigurationError: none can be read.

    """
    if settings.processors is None:
        return [(settings, read_config(settings))]
    found, faults = [], list[str]()
    for file in sorted(settings.processors.glob("*.json")):
        try:
            config = read_config(replace(settings, config=file))
        except ConfigurationError as err:
            _log.error("configuration", extra={"error": str(err)})
            faults.append(str(err))
            continue
        connection = None if config.target is None else config.target.connection
        target = settings.target if connection is None else settings.connections / connection.secret_ref.name
        source = settings.connections / config.source.connection.secret_ref.name
        found.append((replace(settings, config=file, source=source, target=target), config))
    if not found:
        said = "; ".join(faults) or "there is none"
        raise ConfigurationError(f"{settings.processors} has no JSON file of a processor that can be read: {said}")
    return found


def read_config(settings: Settings) -> ProcessorConfig:
    """Read the processor's file; with another cluster id the resource is another one, with a uid of its own.

    Raises:
        ConfigurationError: the file is absent or wrong; the message names the field.

    """
    try:
        document = json.loads(settings.config.read_bytes())
        config, ignored = read_other_version(ProcessorConfig, document)
    except OSError as err:
        raise ConfigurationError(f"cannot read {settings.config}: {err.strerror}") from err
    except ValidationError as err:
        faults = plain_faults(err.errors())
        raise ConfigurationError(f"{settings.config} is not a processor's configuration: {faults}") from err
    except ValueError as err:
        raise ConfigurationError(f"{settings.config} is not JSON: {err}") from err
    if ignored:
        config = config.model_copy(update={"ignored": ignored})
        _log.warning("fields that this version does not know are ignored", extra={"fields": ", ".join(ignored)})
    if settings.cluster_id is None or settings.cluster_id == config.resource.cluster:
        return config
    # The same uid every time, so that it keeps its claim over restarts; never the original's.
    name = f"{settings.cluster_id}/{config.resource.namespace}/{config.resource.name}"
    uid = str(uuid.uuid5(_IDENTITY_NAMESPACE, name))
    resource = config.resource.model_copy(update={"cluster": settings.cluster_id, "uid": uid})
    return config.model_copy(update={"resource": resource, "sweep_uids": [], "resolution": None})
