"""Writes the OCI archives that containerd imports.

`binary` makes a whole image of one static program. `store` reads an image from buildah's overlay store and leaves out
the layers that containerd already has: after a change of code that is some kilobytes. (`buildah push` compresses every
layer again each time: a quarter of a minute for the Spark image.)
"""

import argparse
import base64
import gzip
import hashlib
import io
import json
import pathlib
import shutil
import sys
import tarfile
import tempfile
from typing import Any, BinaryIO

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
USER = "65532:65532"
"""Of a program's process; a number, as Kubernetes wants to see that it is not root."""


def digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def descriptor(kind: str, blob: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": digest(blob), "size": len(blob)}


def add(archive: tarfile.TarFile, name: str, blob: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(blob), mode
    archive.addfile(entry, io.BytesIO(blob))


def blob_path(name: str) -> str:
    return "blobs/" + name.replace(":", "/", 1)


def add_index(archive: tarfile.TarFile, image: str, manifest: dict[str, Any]) -> None:
    named = {**manifest, "annotations": {"io.containerd.image.name": image, "org.opencontainers.image.ref.name": image}}
    add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
    add(archive, "index.json", json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]}).encode())


def binary(image: str, program: pathlib.Path, out: BinaryIO) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        add(layer, program.name, program.read_bytes(), 0o755)
    layer_blob = buffer.getvalue()
    config_blob = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/" + program.name], "User": USER},
            "rootfs": {"type": "layers", "diff_ids": [digest(layer_blob)]},
        }
    ).encode()
    manifest_blob = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": descriptor(CONFIG, config_blob),
            "layers": [descriptor(LAYER, layer_blob)],
        }
    ).encode()
    with tarfile.open(fileobj=out, mode="w|") as archive:
        for blob in (layer_blob, config_blob, manifest_blob):
            add(archive, blob_path(digest(blob)), blob)
        add_index(archive, image, descriptor(MANIFEST, manifest_blob))


def write_layer(store: pathlib.Path, layer: str, out: BinaryIO) -> None:
    """The layer's tar again, byte for byte: the store keeps its headers and padding in one file, its files unpacked."""
    with gzip.open(store / "overlay-layers" / f"{layer}.tar-split.gz") as pieces:
        for line in pieces:
            piece = json.loads(line)
            if piece["type"] == 2:
                out.write(base64.b64decode(piece["payload"]))
            elif piece.get("size"):
                with (store / "overlay" / layer / "diff" / piece["name"]).open("rb") as content:
                    shutil.copyfileobj(content, out, 1 << 20)


def store(image: str, folder: pathlib.Path, image_id: str, present: set[str], out: BinaryIO) -> None:
    """An image's id is the digest of its configuration, and its layers are known by the digests of their tars."""
    config_name = "=" + base64.b64encode(f"sha256:{image_id}".encode()).decode()
    config_blob = (folder / "overlay-images" / image_id / config_name).read_bytes()
    known = json.loads((folder / "overlay-layers" / "layers.json").read_text())
    ids = {layer.get("diff-digest"): layer for layer in known}
    layers = []
    with tarfile.open(fileobj=out, mode="w|") as archive, tempfile.TemporaryFile() as scratch:
        for diff_id in json.loads(config_blob)["rootfs"]["diff_ids"]:
            layer = ids[diff_id]
            layers.append({"mediaType": LAYER, "digest": diff_id, "size": layer["diff-size"]})
            if diff_id in present:
                continue
            scratch.seek(0)
            scratch.truncate()
            write_layer(folder, layer["id"], scratch)
            layers[-1]["size"] = scratch.tell()
            scratch.seek(0)
            entry = tarfile.TarInfo(blob_path(diff_id))
            entry.size = layers[-1]["size"]
            archive.addfile(entry, scratch)
        manifest_blob = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": MANIFEST,
                "config": descriptor(CONFIG, config_blob),
                "layers": layers,
            }
        ).encode()
        add(archive, blob_path(digest(config_blob)), config_blob)
        add(archive, blob_path(digest(manifest_blob)), manifest_blob)
        add_index(archive, image, descriptor(MANIFEST, manifest_blob))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("binary", help="an image of one static program")
    one.add_argument("image")
    one.add_argument("program", type=pathlib.Path)
    many = commands.add_parser("store", help="an image of a store; digests that are loaded come on standard input")
    many.add_argument("image")
    many.add_argument("folder", type=pathlib.Path)
    many.add_argument("id", help="the image's id in the store")
    args = parser.parse_args()
    if args.command == "binary":
        binary(args.image, args.program, sys.stdout.buffer)
    else:
        store(args.image, args.folder, args.id, set(sys.stdin.read().split()), sys.stdout.buffer)


if __name__ == "__main__":
    main()
