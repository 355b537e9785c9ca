"""Writes the OCI archives that containerd imports.

`binary` makes a whole image of one static program. `layout` packs an image that buildah wrote as an OCI layout, without
the layers that containerd already has: after a change of code that is some kilobytes instead of hundreds of megabytes.
"""

import argparse
import hashlib
import io
import json
import pathlib
import sys
import tarfile

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"


def digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def descriptor(kind: str, blob: bytes) -> dict:
    return {"mediaType": kind, "digest": digest(blob), "size": len(blob)}


def add(archive: tarfile.TarFile, name: str, blob: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(blob), mode
    archive.addfile(entry, io.BytesIO(blob))


def blob_path(name: str) -> str:
    return "blobs/" + name.replace(":", "/", 1)


def add_index(archive: tarfile.TarFile, image: str, manifest: dict) -> None:
    named = {**manifest, "annotations": {"io.containerd.image.name": image, "org.opencontainers.image.ref.name": image}}
    add(archive, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
    add(archive, "index.json", json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [named]}).encode())


def binary(image: str, program: pathlib.Path, user: str, out: io.BufferedIOBase) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as layer:
        add(layer, program.name, program.read_bytes(), 0o755)
    layer_blob = buffer.getvalue()
    config_blob = json.dumps({
        "architecture": "amd64", "os": "linux",
        "config": {"Entrypoint": ["/" + program.name], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [digest(layer_blob)]},
    }).encode()
    manifest_blob = json.dumps({
        "schemaVersion": 2, "mediaType": MANIFEST,
        "config": descriptor(CONFIG, config_blob), "layers": [descriptor(LAYER, layer_blob)],
    }).encode()
    with tarfile.open(fileobj=out, mode="w|") as archive:
        for blob in (layer_blob, config_blob, manifest_blob):
            add(archive, blob_path(digest(blob)), blob)
        add_index(archive, image, descriptor(MANIFEST, manifest_blob))


def layout(image: str, folder: pathlib.Path, present: set[str], out: io.BufferedIOBase) -> None:
    (manifest,) = json.loads((folder / "index.json").read_text())["manifests"]
    content = json.loads((folder / blob_path(manifest["digest"])).read_text())
    with tarfile.open(fileobj=out, mode="w|") as archive:
        for layer in content["layers"]:
            if layer["digest"] not in present:
                archive.add(folder / blob_path(layer["digest"]), blob_path(layer["digest"]))
        # These two are small and always sent: the import reads them from the archive.
        for part in (content["config"], manifest):
            archive.add(folder / blob_path(part["digest"]), blob_path(part["digest"]))
        add_index(archive, image, {key: manifest[key] for key in ("mediaType", "digest", "size")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("binary", help="an image of one static program")
    one.add_argument("image")
    one.add_argument("program", type=pathlib.Path)
    one.add_argument("--user", default="65532:65532")
    many = commands.add_parser("layout", help="an image from an OCI layout; digests that are there come on standard input")
    many.add_argument("image")
    many.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()
    if args.command == "binary":
        binary(args.image, args.program, args.user, sys.stdout.buffer)
    else:
        layout(args.image, args.folder, set(sys.stdin.read().split()), sys.stdout.buffer)


if __name__ == "__main__":
    main()
