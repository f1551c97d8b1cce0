"""OCI images made of store paths: one writer for a Nix derivation, a folder and an archive.

An image is a list of layers; a layer is a list of store paths, and of entries that a store cannot hold, such as a
sticky /tmp or a folder of another user. The tar of a layer depends on nothing but those: names are sorted, owners are 0
and times are 1, so that the three forms have the same digests, on every machine.

Layers are not compressed. A registry client compresses on its way out, and a digest that depends on a compressor's
version would not be reproducible. Formats: OCI image-spec 1.0 (layout, manifest, config); the archive also has the
manifest.json of `docker save`, which names the same blobs. Standard library only: builds run this on a bare Python.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, cast

from hyperqwen.errors import BadInputError, MissingError, UnsuitableError, VerificationError

SCHEMA = 1
MTIME = 1  # what Nix gives every file of a store
CREATED = "1970-01-01T00:00:01Z"
BLOCK = 512
RECORD = 20 * BLOCK  # a tar ends at a multiple of this
LABELS = "org.opencontainers.image."

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
OCI_LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'

# progress(layer, bytes): so many more bytes of that layer's contents are done.
Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Entry:
    """A directory (neither `text` nor `target`), a file with `text`, or a link to `target`, at the absolute `path`."""

    path: str
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    text: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class Layer:
    """name: what it is for. paths: store paths, each with everything below it. entries: what no store can hold."""

    name: str
    paths: tuple[str, ...]
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True)
class Image:
    """What an image is made of.

    reference: the name that it is loaded under, such as localhost/hyperqwen:single.
    layers: from the lowest to the topmost; what changes least is lowest.
    config: the `config` object of the OCI image configuration (with Docker's Healthcheck).
    """

    reference: str
    layers: tuple[Layer, ...]
    config: Mapping[str, Any]

    @property
    def tag(self) -> str:
        return self.reference.rpartition(":")[2]


@dataclass(frozen=True)
class Blob:
    """A file of a layout: `digest` is the sha256 of its `size` bytes, in hex."""

    digest: str
    size: int

    @property
    def file(self) -> str:
        """Where it lies in a layout."""
        return f"blobs/sha256/{self.digest}"

    def descriptor(self, media_type: str, annotations: Mapping[str, str] | None = None) -> dict[str, Any]:
        found = {"mediaType": media_type, "digest": f"sha256:{self.digest}", "size": self.size}
        return {**found, "annotations": dict(annotations)} if annotations else found


# Closures -----------------------------------------------------------------------------------------------------------
def read_graph(text: str) -> dict[str, tuple[str, ...]]:
    """{store path: paths it refers to} of one file of Nix's exportReferencesGraph.

    For each path the file has the path, its deriver (or an empty line), a count, and that many references.
    """
    lines = text.splitlines()
    graph: dict[str, tuple[str, ...]] = {}
    at = 0
    while at < len(lines):
        end = at + 3 + int(lines[at + 2])
        graph[lines[at]] = tuple(path for path in lines[at + 3 : end] if path != lines[at])
        at = end
    return graph


def partition(
    graph: Mapping[str, Sequence[str]], layers: Sequence[tuple[str, Sequence[str]]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Give every path of `graph` to the lowest layer that needs it.

    Args:
        graph: {path: paths it refers to}, closed: every path that is referred to is a key.
        layers: (name, roots) from the lowest up; a layer gets what its roots reach and no lower layer has.

    Returns (name, sorted paths) for each layer. Raises BadInputError for a root that `graph` lacks, for a layer that
    is left with nothing, and for a path that no root reaches: an image without it would not run.
    """
    given: set[str] = set()
    parts = []
    for name, roots in layers:
        if foreign := sorted(set(roots) - graph.keys()):
            raise BadInputError(f"layer {name}: {foreign[0]} is not in the closure of the image")
        paths = _reachable(graph, roots) - given
        if not paths:
            raise BadInputError(f"layer {name}: everything that its roots reach is in lower layers", "remove it")
        given |= paths
        parts.append((name, tuple(sorted(paths))))
    if missing := sorted(graph.keys() - given):
        raise BadInputError(f"{len(missing)} paths of the closure are in no layer, the first is {missing[0]}")
    return parts


def _reachable(graph: Mapping[str, Sequence[str]], roots: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += graph[path]
    return found


# Description of an image --------------------------------------------------------------------------------------------
def to_json(image: Image) -> str:
    """The image as the text that `from_json` reads."""
    return _json(
        {
            "schema": SCHEMA,
            "reference": image.reference,
            "layers": [layer_json(layer) for layer in image.layers],
            "config": image.config,
        }
    ).decode()


def layer_json(layer: Layer) -> dict[str, Any]:
    """The layer as `to_json` writes it."""
    return {"name": layer.name, "paths": list(layer.paths), "entries": [_entry_json(entry) for entry in layer.entries]}


def _entry_json(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = {"path": entry.path, "mode": f"{entry.mode:04o}", "uid": entry.uid, "gid": entry.gid}
    for key in ("text", "target"):
        if getattr(entry, key) is not None:
            found[key] = getattr(entry, key)
    return found


def from_json(text: str, where: str) -> Image:
    """The image that `text` describes; `where` names it in messages. Raises BadInputError."""
    try:
        data = json.loads(text)
        if data["schema"] != SCHEMA:
            raise BadInputError(f"{where} has schema {data['schema']!r}, this program reads {SCHEMA}", "build it again")
        return Image(
            data["reference"],
            tuple(
                Layer(
                    layer["name"], tuple(layer["paths"]), tuple(_entry_from_json(entry) for entry in layer["entries"])
                )
                for layer in data["layers"]
            ),
            data["config"],
        )
    except (ValueError, LookupError, TypeError) as error:
        raise BadInputError(f"{where} does not describe an image: {error!r}", "build it again") from None


def _entry_from_json(data: Mapping[str, Any]) -> Entry:
    return Entry(data["path"], int(data["mode"], 8), data["uid"], data["gid"], data.get("text"), data.get("target"))


def load(file: Path) -> Image:
    """The image that `file` describes; raises MissingError or BadInputError."""
    try:
        return from_json(file.read_text(encoding="utf-8"), str(file))
    except (FileNotFoundError, IsADirectoryError):
        raise MissingError(
            f"the image description {file} does not exist", "start this through `./hq run .#oci`"
        ) from None


# Layers -------------------------------------------------------------------------------------------------------------
class _Counted:
    """A file for tarfile that counts what it passes on: a pipe cannot tell where it is."""

    def __init__(self, out: BinaryIO | None) -> None:
        self._out = out
        self.size = 0

    def write(self, data: bytes) -> int:
        self.size += len(data)
        if self._out is not None:
            self._out.write(data)
        return len(data)

    def tell(self) -> int:
        return self.size


class _Hashed(_Counted):
    """One that hashes it as well, and reports its length."""

    def __init__(self, out: BinaryIO | None, report: Callable[[int], None] | None) -> None:
        super().__init__(out)
        self._report = report
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        if self._report is not None:
            self._report(len(data))
        return super().write(data)

    @property
    def blob(self) -> Blob:
        return Blob(self._hash.hexdigest(), self.size)


def write_layer(layer: Layer, out: BinaryIO | None, progress: Progress | None = None) -> Blob:
    """Write the tar of `layer` to `out`; with None it is only hashed.

    Raises MissingError for a store path that is gone, BadInputError for a path outside a store or a special file.
    """
    sink = _Hashed(out, None if progress is None else lambda count: progress(layer.name, count))
    tar = tarfile.TarFile(
        fileobj=cast(BinaryIO, sink), mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", copybufsize=1 << 20
    )
    with tar:
        for entry in _with_parents(layer):
            text = None if entry.text is None else BytesIO(entry.text.encode())
            tar.addfile(_entry_info(entry), text)
        for path in sorted(layer.paths):
            for place in _below(path, layer.name):
                _add(tar, place)
    return sink.blob


def estimated_size(layer: Layer) -> int:
    """Bytes of the tar of `layer`, to a few kilobytes."""
    total = RECORD + BLOCK * (len(layer.entries) + 2)
    for path in layer.paths:
        for place in _below(path, layer.name):
            status = os.lstat(place)
            names = [place[1:]]
            if stat.S_ISLNK(status.st_mode):
                names.append(os.readlink(place))
            elif stat.S_ISREG(status.st_mode):
                total += -(-status.st_size // BLOCK) * BLOCK
            # A name that is too long for a header has a header and a block of its own.
            total += BLOCK + (2 * BLOCK if any(len(name) > tarfile.LENGTH_NAME for name in names) else 0)
    return total


def _with_parents(layer: Layer) -> list[Entry]:
    """The entries of a layer in the order of their paths, and the folders above its paths."""
    entries = {entry.path: entry for entry in layer.entries}
    if len(entries) != len(layer.entries):
        raise BadInputError(f"layer {layer.name} has two entries for one path")
    for path in (*layer.paths, *entries):
        if not path.startswith("/") or {"", ".", ".."} & set(path[1:].split("/")):
            raise BadInputError(f"layer {layer.name}: {path!r} is not an absolute, plain path")
    above = {str(parent) for path in (*layer.paths, *entries) for parent in Path(path).parents}
    for path in above - {"/"}:
        entries.setdefault(path, Entry(path))
    return [entries[path] for path in sorted(entries, key=lambda path: path.split("/"))]


def _below(path: str, layer: str) -> Iterator[str]:
    """`path` and everything below it; folders before what they hold, names sorted. Links are not followed."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        raise MissingError(
            f"{path}, of layer {layer}, is not in the store", "it was garbage-collected: build or run this again"
        ) from None
    yield path
    if stat.S_ISDIR(status.st_mode):
        for name in sorted(os.listdir(path), key=os.fsencode):
            yield from _below(f"{path}/{name}", layer)


def _info(path: str, kind: bytes, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path.lstrip("/"))
    info.type, info.mode, info.mtime = kind, mode, MTIME
    return info


def _entry_info(entry: Entry) -> tarfile.TarInfo:
    if entry.target is not None:
        info = _info(entry.path, tarfile.SYMTYPE, 0o777)
        info.linkname = entry.target
    elif entry.text is not None:
        info = _info(entry.path, tarfile.REGTYPE, entry.mode)
        info.size = len(entry.text.encode())
    else:
        info = _info(entry.path, tarfile.DIRTYPE, entry.mode)
    info.uid, info.gid = entry.uid, entry.gid
    return info


def _add(tar: tarfile.TarFile, path: str) -> None:
    """Add one file, folder or link, with the modes that it has in a store: a store that was copied may differ."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        info = _info(path, tarfile.SYMTYPE, 0o777)
        info.linkname = os.readlink(path)
        tar.addfile(info)
    elif stat.S_ISDIR(status.st_mode):
        tar.addfile(_info(path, tarfile.DIRTYPE, 0o555))
    elif stat.S_ISREG(status.st_mode):
        info = _info(path, tarfile.REGTYPE, 0o555 if status.st_mode & stat.S_IXUSR else 0o444)
        info.size = status.st_size
        with open(path, "rb", buffering=0) as file:
            tar.addfile(info, cast(BinaryIO, file))
    else:
        raise BadInputError(f"{path} is neither a file, a folder nor a link: no store has such")


# Images -------------------------------------------------------------------------------------------------------------
def documents(image: Image, layers: Sequence[Blob]) -> tuple[bytes, bytes, bytes]:
    """The config, the manifest and the index of `image`, whose layers have become `layers`."""
    labels = image.config.get("Labels", {})
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": CREATED,
            "config": image.config,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{blob.digest}" for blob in layers]},
            "history": [{"created": CREATED, "created_by": f"hyperqwen: {layer.name}"} for layer in image.layers],
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _blob(config).descriptor(CONFIG_TYPE),
            "layers": [
                blob.descriptor(LAYER_TYPE, {"hyperqwen.layer": layer.name})
                for layer, blob in zip(image.layers, layers, strict=True)
            ],
            "annotations": {key: value for key, value in labels.items() if key.startswith(LABELS)},
        }
    )
    # containerd and podman load an archive under the first name, `skopeo … oci:FOLDER:TAG` looks for the second.
    names = {"io.containerd.image.name": image.reference, f"{LABELS}ref.name": image.tag}
    index = _json(
        {
            "schemaVersion": 2,
            "mediaType": INDEX_TYPE,
            "manifests": [
                {
                    **_blob(manifest).descriptor(MANIFEST_TYPE, names),
                    "platform": {"architecture": "amd64", "os": "linux"},
                }
            ],
        }
    )
    return config, manifest, index


def manifest_digest(manifest: bytes) -> str:
    """What registries and clients call the digest of the image."""
    return f"sha256:{_blob(manifest).digest}"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def _blob(data: bytes) -> Blob:
    return Blob(hashlib.sha256(data).hexdigest(), len(data))


def write_layout(image: Image, folder: Path, progress: Progress | None = None) -> str:
    """Write `image` as an OCI layout into the new or empty `folder`; the image's digest.

    Nothing is at `folder` until all of it is. Raises BadInputError for a folder that holds something, UnsuitableError
    where the disk has no room.
    """
    with _new(folder, image, is_folder=True) as target:
        layers = []
        for layer in image.layers:
            partial = target / "partial"
            with partial.open("wb") as file:
                layers.append(write_layer(layer, file, progress))
                _flush(file)
            partial.rename(place(target, layers[-1]))
        return finish_layout(image, target, layers)


def place(folder: Path, blob: Blob) -> Path:
    """Where `blob` lies in the layout `folder`; the folders above it are made."""
    file = folder / blob.file
    file.parent.mkdir(parents=True, exist_ok=True)
    return file


def finish_layout(image: Image, folder: Path, layers: Sequence[Blob]) -> str:
    """Write what describes the blobs `layers`, which `folder` has already; the image's digest."""
    config, manifest, index = documents(image, layers)
    for data in (config, manifest):
        _write(place(folder, _blob(data)), data)
    _write(folder / "oci-layout", OCI_LAYOUT)
    _write(folder / "index.json", index)
    return manifest_digest(manifest)


def write_archive(image: Image, file: Path, progress: Progress | None = None) -> str:
    """Write `image` as a new tar `file` that docker, podman and skopeo load; the image's digest.

    Raises BadInputError for a file that exists, UnsuitableError where the disk has no room.
    """
    with _new(file, image, is_folder=False) as target, target.open("wb") as out:
        digest = stream_archive(image, out, progress)
        _flush(out)
    return digest


def stream_archive(image: Image, out: BinaryIO, progress: Progress | None = None) -> str:
    """Write the archive of `image` to `out`, which need not be seekable; the image's digest.

    A tar names and measures a member before its bytes, and a blob's name is its digest: every layer is made twice, of
    which the first time is only hashed. Raises VerificationError when the two differ.
    """
    layers = [write_layer(layer, None, progress) for layer in image.layers]
    config, manifest, index = documents(image, layers)
    saved = _json(
        [
            {
                "Config": _blob(config).file,
                "RepoTags": [image.reference],
                "Layers": [blob.file for blob in layers],
            }
        ]
    )
    counted = cast(BinaryIO, _Counted(out))
    tar = tarfile.TarFile(fileobj=counted, mode="w", format=tarfile.PAX_FORMAT)
    with tar:
        for name in ("blobs", "blobs/sha256"):
            tar.addfile(_info(name, tarfile.DIRTYPE, 0o755))
        files = {"oci-layout": OCI_LAYOUT, "index.json": index, "manifest.json": saved}
        files |= {_blob(data).file: data for data in (config, manifest)}
        for name, data in sorted(files.items()):
            _add_bytes(tar, name, data)
        for layer, blob in zip(image.layers, layers, strict=True):
            _add_layer(tar, layer, blob, counted, progress)
    return manifest_digest(manifest)


def _add_bytes(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = _info(name, tarfile.REGTYPE, 0o644)
    info.size = len(data)
    tar.addfile(info, BytesIO(data))


def _add_layer(tar: tarfile.TarFile, layer: Layer, blob: Blob, out: BinaryIO, progress: Progress | None) -> None:
    info = _info(blob.file, tarfile.REGTYPE, 0o644)
    info.size = blob.size
    # The header alone: the body is written past tarfile, which would have to read it from a file.
    header = info.tobuf(tarfile.PAX_FORMAT)
    out.write(header)
    again = write_layer(layer, out, progress)
    if again != blob:
        raise VerificationError(
            f"layer {layer.name} changed while it was written: sha256 {blob.digest}, then {again.digest}",
            "something writes to the Nix store: nix-store --verify --check-contents",
        )
    tar.offset += len(header) + blob.size


def _write(file: Path, data: bytes) -> None:
    with file.open("wb") as out:
        out.write(data)
        _flush(out)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _new(target: Path, image: Image, *, is_folder: bool) -> Iterator[Path]:
    """A place beside `target` that becomes it when the block ends well, and goes when it does not."""
    if target.is_symlink() or (target.exists() and not (is_folder and target.is_dir() and not any(target.iterdir()))):
        raise BadInputError(
            f"{target} exists{' and is not an empty folder' if is_folder else ''}", "remove it, or name another"
        )
    parent = target.absolute().parent
    if not parent.is_dir():
        raise BadInputError(f"there is no folder {parent} to write {target.name} into", f"make it: mkdir -p {parent}")
    needed = sum(map(estimated_size, image.layers))
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UnsuitableError(
            f"{target} needs {needed / 1e9:.1f} GB and {parent} has {free / 1e9:.1f} GB free",
            "free space, or name a folder on another disk",
        )
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=parent))
    try:
        inner = scratch / "image"
        if is_folder:
            inner.mkdir(mode=0o755)
        yield inner
        inner.rename(target)
        directory = os.open(parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
