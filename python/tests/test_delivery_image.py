from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.delivery import image
from hyperqwen.delivery.image import Entry, Image, Layer
from hyperqwen.errors import BadInputError, MissingError, UnsuitableError, VerificationError


def tree(folder: Path) -> Path:
    """A folder with what a store path has: files, a program, folders, links, a long name."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/run").write_text("#!/bin/sh\n")
    (folder / "bin/run").chmod(0o755)
    (folder / "lib" / ("long" * 40)).mkdir(parents=True)
    (folder / "lib" / ("long" * 40) / "größe").write_bytes(bytes(range(256)) * 5)
    (folder / "lib" / "empty").write_text("")
    (folder / "lib" / "gone").symlink_to("/nix/store/" + "x" * 120)
    return folder


@pytest.fixture
def made(tmp_path: Path) -> Image:
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    (two / "more").write_text("more")
    base = Layer(
        "base",
        (str(one),),
        (
            Entry("/tmp", 0o1777),
            Entry("/cache", 0o700, 65532, 65532),
            Entry("/etc/passwd", 0o644, text="root:x:0:0::/:/bin/sh\n"),
            Entry("/bin/sh", target=f"{one}/bin/run"),
        ),
    )
    labels = {"org.opencontainers.image.title": "test", "own": "x"}
    return Image("localhost/test:tag", (base, Layer("code", (str(two),))), {"User": "65532", "Labels": labels})


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {info.name: info for info in tar.getmembers()}


def layer_bytes(layer: Layer) -> bytes:
    out = io.BytesIO()
    blob = image.write_layer(layer, out)
    assert (blob.size, blob.digest) == (len(out.getvalue()), hashlib.sha256(out.getvalue()).hexdigest())
    return out.getvalue()


def test_layer_says_nothing_about_who_made_it_and_when(made: Image) -> None:
    found = members(layer_bytes(made.layers[0]))
    owned = {name: (info.uid, info.gid) for name, info in found.items() if info.uid or info.gid}
    assert owned == {"cache": (65532, 65532)}
    assert {(info.mtime, info.uname, info.gname) for info in found.values()} == {(1, "", "")}


def test_layer_has_the_modes_of_a_store_and_of_its_entries(made: Image) -> None:
    found = members(layer_bytes(made.layers[0]))
    one = made.layers[0].paths[0].lstrip("/")
    modes = {name: oct(found[name].mode) for name in ("tmp", "cache", "etc/passwd", f"{one}/bin/run", f"{one}/lib")}
    assert modes == {
        "tmp": "0o1777",
        "cache": "0o700",
        "etc/passwd": "0o644",
        f"{one}/bin/run": "0o555",
        f"{one}/lib": "0o555",
    }
    assert oct(found[f"{one}/lib/empty"].mode) == "0o444"


def test_layer_keeps_contents_long_names_and_links(made: Image) -> None:
    data = layer_bytes(made.layers[0])
    one = made.layers[0].paths[0].lstrip("/")
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        file = tar.extractfile(f"{one}/lib/{'long' * 40}/größe")
        assert file is not None
        assert file.read() == bytes(range(256)) * 5
        assert tar.getmember(f"{one}/lib/gone").linkname == "/nix/store/" + "x" * 120
        assert tar.getmember("bin/sh").linkname == f"/{one}/bin/run"


def test_layer_has_every_folder_before_what_is_in_it(made: Image) -> None:
    seen: set[str] = set()
    for name in members(layer_bytes(made.layers[0])):
        parent = os.path.dirname(name)
        assert not parent or parent in seen, name
        seen.add(name)


def test_layer_does_not_depend_on_times_modes_or_the_order_of_a_folder(tmp_path: Path, made: Image) -> None:
    before = layer_bytes(made.layers[0])
    one = Path(made.layers[0].paths[0])
    aside = shutil.copytree(one, tmp_path / "aside", symlinks=True)
    shutil.rmtree(one)
    one.mkdir(mode=0o700)
    for path in sorted(aside.rglob("*"), reverse=True):
        target = one / path.relative_to(aside)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            target.symlink_to(os.readlink(path))
        elif path.is_file():
            shutil.copy(path, target)
            target.chmod(0o700 if path.stat().st_mode & 0o100 else 0o640)
            os.utime(target, (5, 5))
    assert layer_bytes(made.layers[0]) == before


def test_layer_of_a_path_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="is not in the store"):
        image.write_layer(Layer("code", (str(tmp_path / "gone"),)), None)


def test_layer_of_a_special_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInputError, match="neither a file"):
        image.write_layer(Layer("code", (str(tmp_path),)), None)


@pytest.mark.parametrize("path", ["relative", "/a/../b", "/a/", "//a"])
def test_layer_with_a_path_that_could_leave_the_rootfs_is_refused(path: str) -> None:
    with pytest.raises(BadInputError, match="plain path"):
        image.write_layer(Layer("base", (), (Entry(path),)), None)


def test_layer_with_two_entries_for_one_path_is_refused() -> None:
    with pytest.raises(BadInputError, match="two entries"):
        image.write_layer(Layer("base", (), (Entry("/a"), Entry("/a", text="x"))), None)


def test_estimate_is_what_a_layer_takes(made: Image) -> None:
    for layer in made.layers:
        size = len(layer_bytes(layer))
        assert abs(image.estimated_size(layer) - size) <= 2 * image.RECORD


# Closures -----------------------------------------------------------------------------------------------------------
GRAPH = "/a\n\n2\n/a\n/b\n/b\n/d.drv\n0\n/c\n\n1\n/b\n"


def test_graph_is_read_without_references_to_itself() -> None:
    assert image.read_graph(GRAPH) == {"/a": ("/b",), "/b": (), "/c": ("/b",)}


def test_partition_gives_a_path_to_the_lowest_layer_that_needs_it() -> None:
    graph = image.read_graph(GRAPH)
    assert image.partition(graph, [("low", ["/c"]), ("high", ["/a"])]) == [("low", ("/b", "/c")), ("high", ("/a",))]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([("low", ["/a"])], "in no layer"),
        ([("low", ["/a", "/c"]), ("high", ["/b"])], "in lower layers"),
        ([("low", ["/z"])], "not in the closure"),
    ],
)
def test_partition_refuses_layers_that_do_not_fit(layers: list[tuple[str, list[str]]], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        image.partition(image.read_graph(GRAPH), layers)


@given(st.lists(st.sets(st.integers(0, 11)), min_size=12, max_size=12), st.integers(1, 12))
def test_every_path_is_in_one_layer_and_needs_none_above(references: list[set[int]], low: int) -> None:
    # Every path is a root of one of two layers, so that both may be left with nothing, but none is left over.
    graph = {f"/{n}": tuple(f"/{m}" for m in sorted(found - {n})) for n, found in enumerate(references)}
    roots = [("low", list(graph)[:low])] + ([("high", list(graph)[low:])] if low < len(graph) else [])
    try:
        parts = image.partition(graph, roots)
    except BadInputError as error:
        assert "in lower layers" in str(error)
        return
    flat = [path for _, paths in parts for path in paths]
    assert sorted(flat) == sorted(graph)
    lowest = set(parts[0][1])
    assert all(set(graph[path]) <= lowest for path in lowest)


# Formats ------------------------------------------------------------------------------------------------------------
def read_layout(folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Index, manifest and config of a layout, after every blob was compared with its name."""
    for file in (folder / "blobs/sha256").iterdir():
        assert hashlib.sha256(file.read_bytes()).hexdigest() == file.name
    index = json.loads((folder / "index.json").read_text())
    blobs = folder / "blobs"
    (described,) = index["manifests"]
    manifest = json.loads((blobs / described["digest"].replace(":", "/")).read_text())
    config = json.loads((blobs / manifest["config"]["digest"].replace(":", "/")).read_text())
    for descriptor in (described, manifest["config"], *manifest["layers"]):
        assert (blobs / descriptor["digest"].replace(":", "/")).stat().st_size == descriptor["size"]
    return index, manifest, config


def test_layout_says_what_the_image_is(tmp_path: Path, made: Image) -> None:
    digest = image.write_layout(made, tmp_path / "out")
    index, manifest, config = read_layout(tmp_path / "out")
    assert json.loads((tmp_path / "out/oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert index["manifests"][0]["digest"] == digest
    assert index["manifests"][0]["annotations"] == {
        "io.containerd.image.name": "localhost/test:tag",
        "org.opencontainers.image.ref.name": "tag",
    }
    assert config["config"] == dict(made.config)
    assert config["rootfs"]["diff_ids"] == [layer["digest"] for layer in manifest["layers"]]
    assert [layer["annotations"]["hyperqwen.layer"] for layer in manifest["layers"]] == ["base", "code"]
    assert len(config["history"]) == 2
    assert manifest["annotations"] == {"org.opencontainers.image.title": "test"}


def test_layout_is_the_same_the_second_time(tmp_path: Path, made: Image) -> None:
    digests = {image.write_layout(made, tmp_path / name) for name in ("first", "second")}
    assert len(digests) == 1
    first, second = (
        sorted(str(f.relative_to(tmp_path / n)) for f in (tmp_path / n).rglob("*")) for n in ("first", "second")
    )
    assert first == second


def test_changed_path_changes_its_own_layer_alone(tmp_path: Path, made: Image) -> None:
    image.write_layout(made, tmp_path / "before")
    (Path(made.layers[1].paths[0]) / "more").write_text("other")
    image.write_layout(made, tmp_path / "after")
    before, after = (read_layout(tmp_path / name)[1]["layers"] for name in ("before", "after"))
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_layout_goes_into_an_empty_folder(tmp_path: Path, made: Image) -> None:
    (tmp_path / "out").mkdir()
    image.write_layout(made, tmp_path / "out")
    read_layout(tmp_path / "out")


def test_folder_with_something_in_it_stays_as_it_is(tmp_path: Path, made: Image) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(BadInputError, match="not an empty folder"):
        image.write_layout(made, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_failure_leaves_nothing(tmp_path: Path, made: Image) -> None:
    broken = Image(made.reference, (*made.layers, Layer("more", (str(tmp_path / "later"),))), made.config)
    (tmp_path / "later").write_text("x")
    place = tmp_path / "place"
    place.mkdir()

    def vanish(layer: str, _count: int) -> None:
        if layer == "code":
            (tmp_path / "later").unlink(missing_ok=True)

    with pytest.raises(MissingError):
        image.write_layout(broken, place / "out", vanish)
    assert list(place.iterdir()) == []


def test_disk_without_room_is_said_before_anything_is_written(
    tmp_path: Path, made: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: full)
    with pytest.raises(UnsuitableError, match=r"needs 0\.0 GB and .* has 0\.0 GB free"):
        image.write_layout(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_archive_is_the_layout_and_what_docker_loads(tmp_path: Path, made: Image) -> None:
    digest = image.write_layout(made, tmp_path / "folder")
    assert image.write_archive(made, tmp_path / "image.tar") == digest
    with tarfile.open(tmp_path / "image.tar") as tar:
        tar.extractall(tmp_path / "archive")
    _, manifest, _ = read_layout(tmp_path / "archive")
    saved = json.loads((tmp_path / "archive/manifest.json").read_text())
    assert saved == [
        {
            "Config": f"blobs/{manifest['config']['digest'].replace(':', '/')}",
            "RepoTags": ["localhost/test:tag"],
            "Layers": [f"blobs/{layer['digest'].replace(':', '/')}" for layer in manifest["layers"]],
        }
    ]
    (tmp_path / "archive/manifest.json").unlink()
    for file in (tmp_path / "folder").rglob("*"):
        if file.is_file():
            assert (tmp_path / "archive" / file.relative_to(tmp_path / "folder")).read_bytes() == file.read_bytes()


def test_archive_needs_no_seeking_and_is_a_whole_number_of_records(made: Image) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.data += data
            return len(data)

        def tell(self) -> int:
            return len(self.data)

        def seek(self, *_: int) -> int:
            raise OSError("a pipe cannot seek")

    pipe = Pipe()
    image.stream_archive(made, pipe)  # type: ignore[arg-type]
    assert len(pipe.data) % image.RECORD == 0
    assert members(bytes(pipe.data))["oci-layout"].size == len(image.OCI_LAYOUT)


def test_archive_of_a_store_that_changes_meanwhile_is_refused(tmp_path: Path, made: Image) -> None:
    seen: list[str] = []

    def change(layer: str, _count: int) -> None:
        if layer == "base" and "code" in seen:  # between hashing and writing
            (Path(made.layers[1].paths[0]) / "more").write_text("else")
        seen.append(layer)

    with pytest.raises(VerificationError, match="layer code changed"):
        image.write_archive(made, tmp_path / "image.tar", change)
    assert not (tmp_path / "image.tar").exists()


def test_archive_does_not_replace_a_file(tmp_path: Path, made: Image) -> None:
    (tmp_path / "image.tar").write_text("mine")
    with pytest.raises(BadInputError, match="exists"):
        image.write_archive(made, tmp_path / "image.tar")
    assert (tmp_path / "image.tar").read_text() == "mine"


def test_target_in_a_folder_that_is_not_there_is_refused(tmp_path: Path, made: Image) -> None:
    with pytest.raises(BadInputError, match="there is no folder"):
        image.write_layout(made, tmp_path / "no" / "out")


# Descriptions -------------------------------------------------------------------------------------------------------
def test_description_is_read_as_it_was_written(tmp_path: Path, made: Image) -> None:
    file = tmp_path / "image.json"
    file.write_text(image.to_json(made))
    assert image.load(file) == made


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "does not describe an image"),
        ("[]", "does not describe an image"),
        ('{"schema": 2}', "schema 2"),
        ('{"schema": 1, "reference": "x"}', "does not describe an image"),
    ],
)
def test_other_text_is_no_description(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        image.from_json(text, "image.json")


def test_description_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"gone\.json"):
        image.load(tmp_path / "gone.json")
