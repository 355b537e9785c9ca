"""`outbox run -f processor.yaml`: one processor, or several that share it, in one process, without Kubernetes.

The manifest becomes the same configuration that the operator would write, and the worker's own `main` runs it: the
same code, claim, lease and checkpoint as in a pod. Ctrl-C or SIGTERM drains.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from outbox_cli.context import DATABASE_HELP, Context, check_schema
from outbox_cli.database.moves import LOCAL
from outbox_cli.errors import CommandError, Exit, RefusedError, UsageError
from outbox_cli.manifest import Manifest, read_manifests
from outbox_core.spec import Engine
from outbox_worker.logs import LOG_FORMAT

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Iterator

_IDENTITIES: Final = uuid.UUID("2a0a2c0e-52f1-5b0c-9c5b-6c1f0f0ad7f4")
TARGET_DIRECTORY: Final = "OUTBOX_TARGET_CONNECTION"
"""Names the directory of the target's files, a broker or another database, where no option does."""


def run(context: Context) -> Exit | int:
    """Run until Ctrl-C; the exit status is the worker's."""
    options = context.options
    manifests = [_identify(each) for each in _read(options)]
    for each in manifests:
        check_schema(options, each.processor.spec.source)
        check_runnable(each)
    with _make_home() as directory:
        home = Path(directory)
        arguments = _lay_out(context, manifests, home)
        for each in manifests:
            context.console.note(
                f"{each.processor.processor_id} runs as {each.processor.ref}; Ctrl-C finishes or rolls back the batch "
                "and stops"
            )
        if sys.stderr.isatty():
            os.environ.setdefault(LOG_FORMAT, "text")
        # Late: the other commands start without a worker's metrics, HTTP server and targets.
        from outbox_worker.main import main as run_worker

        return run_worker(
            [
                *arguments, "--connections", str(home / "connections"), "--termination-log", str(home / "none"),
                "--host", options.host, "--port", str(options.port),
            ]
        )  # fmt: skip


def _make_home() -> tempfile.TemporaryDirectory[str]:
    """Make the folder for the files that a pod would have mounted."""
    try:
        return tempfile.TemporaryDirectory(prefix="outbox-run-")
    except OSError as err:
        raise CommandError(
            f"no folder for temporary files can be made ({err.strerror}): name in TMPDIR one that this user may write"
        ) from err


def _read(options: Namespace) -> list[Manifest]:
    """Read one processor, or several that share a process."""
    cluster = options.cluster_id or f"{LOCAL}{socket.gethostname()}"
    manifests = read_manifests(options.file, cluster)
    processors = [each.processor for each in manifests]
    groups = {(each.ref.namespace, each.spec.worker.shared) for each in processors}
    is_repeated = len({each.name for each in processors}) < len(processors)
    if len(processors) != 1 and (len(groups) != 1 or processors[0].spec.worker.shared is None or is_repeated):
        raise CommandError(
            f"the files hold {len(manifests)} processors: give one, or several of one namespace, each once, that write "
            "the same name in spec.worker.shared, which run in one process"
        )
    return manifests


def _identify(manifest: Manifest) -> Manifest:
    """Give the resource the same uid every time: the claim is found again by the next run on this machine."""
    ref = manifest.processor.ref
    uid = str(uuid.uuid5(_IDENTITIES, f"{ref.cluster}/{ref.namespace}/{ref.name}"))
    return replace(manifest, processor=manifest.processor.model_copy(update={"uid": uid}))


def check_runnable(manifest: Manifest) -> None:
    """Refuse what cannot run here."""
    spec = manifest.processor.spec
    if spec.engine is not Engine.WORKER:
        raise RefusedError(f"engine {spec.engine} needs its own runtime: `outbox run` runs engine Worker")
    if spec.suspend:
        raise RefusedError("spec.suspend is true: nothing would be handled")
    if spec.hand_over_to is not None:
        raise RefusedError("spec.handOverTo is set: this resource gives its processor away")


def _lay_out(context: Context, manifests: list[Manifest], home: Path) -> list[str]:
    """Put the files where a pod would have them mounted; connections are links, so that no secret is copied.

    A shared pod has a directory for each Secret, another one has source/ and target/.
    """
    is_shared, connections = len(manifests) > 1, home / "connections"
    for directory in (home / "processors", home / "handler", connections):
        directory.mkdir()
    for manifest in manifests:
        _place_handler(context, manifest, home / "handler")
        file = home / "processors" / f"{manifest.processor.name}.json"
        file.write_text(_format(manifest, home / "handler"))
        spec = manifest.processor.spec
        _link_source(context, connections / (spec.source.connection.secret_ref.name if is_shared else "source"))
        if spec.target is not None and spec.target.connection is not None:
            secret = spec.target.connection.secret_ref.name
            _link_target(context, secret, connections / (secret if is_shared else "target"))
    if is_shared:
        return ["--processors", str(home / "processors")]
    return ["--config", str(file), "--handler", str(home / "handler")]


def _format(manifest: Manifest, handler: Path) -> str:
    # Late, and not before it is needed: it brings the operator's renderer along.
    from outbox_operator.rendering.manifests import build_config, format_config
    from outbox_operator.settings import Images

    config = build_config(manifest.processor, Images())
    # An API server would count generations; here the process that was started last knows best how many partitions there
    # shall be. But a process that is started again as it was must not forget what message killed it.
    text_id = find_text_id(format_config(config), handler)
    return format_config(config.model_copy(update={"generation": int(time.time()), "text_id": text_id}))


def _link_source(context: Context, place: Path) -> None:
    if place.exists():
        return
    directory = context.secret_directory
    if directory is not None:
        if not directory.is_dir():
            raise CommandError(f"{directory} is not a directory with a connection's files")
        place.symlink_to(directory.resolve())
    elif context.options.dsn_file is not None:
        place.mkdir()
        (place / "uri").symlink_to(context.options.dsn_file.resolve())
    elif context.has_environment:
        place.mkdir()
        # Names nothing, so libpq takes everything from the environment.
        (place / "uri").write_text("postgresql://")
    else:
        raise UsageError(DATABASE_HELP)


def find_text_id(text: str, handler: Path) -> int:
    """Hash what is run: the processor's text and the handler's Python files, to a positive bigint.

    A handler that is installed is not looked into; nor is what is hidden: `.venv`, an editor's locks and copies.

    """
    found = hashlib.sha256(text.encode())
    for file in sorted(_find_code(handler)):
        try:
            content = file.read_bytes()
        except OSError as err:
            raise CommandError(f"cannot read {file}: {err.strerror}") from err
        found.update(f"\0{file.relative_to(handler)}\0{len(content)}\0".encode() + content)
    return int.from_bytes(found.digest()[:8]) >> 1


def _find_code(handler: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(handler):
        folders[:] = [name for name in folders if not name.startswith(".")]
        shown = (Path(place, name) for name in files if name.endswith(".py") and not name.startswith("."))
        yield from (file for file in shown if file.is_file())


def _place_handler(context: Context, manifest: Manifest, handler: Path) -> None:
    """Files of the ConfigMap that came with the manifest, or of --handler."""
    target = manifest.processor.spec.target
    if target is None or target.python is None:
        return
    if context.options.handler is not None:
        handler.rmdir()
        handler.symlink_to(context.options.handler.resolve())
        return
    if target.python.config_map_ref is None:
        return  # the module is to be found on the Python path, as in an image of one's own
    name = target.python.config_map_ref.name
    files = manifest.config_maps.get(name)
    if files is None:
        raise CommandError(f"ConfigMap {name} is in none of the files: add it with -f, or name a folder with --handler")
    for file, text in files.items():
        (handler / Path(file).name).write_text(text)


def _link_target(context: Context, secret: str, place: Path) -> None:
    """Link the target's files: those in a directory of its Secret's name, where there is one, else those named."""
    if place.exists():
        return
    options = context.options
    named = options.target_connection or os.environ.get(TARGET_DIRECTORY)
    if not named and options.connections is None:
        raise UsageError(
            f"which target? --target-connection DIR, --connections DIR (DIR/target), or {TARGET_DIRECTORY}"
        )
    directory = Path(named) if named else options.connections / "target"
    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory with the target's files")
    place.symlink_to((directory / secret if (directory / secret).is_dir() else directory).resolve())
