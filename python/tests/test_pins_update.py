"""Updating: what is asked of uv, which wheel is taken, how .debs come out of a mirror; nothing is half written."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import lzma
import os
import shutil
import stat
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import BadInputError, MissingError, UnsuitableError, VerificationError
from hyperqwen.pins import update as module
from hyperqwen.pins.groups import GroupsFile, load_groups
from hyperqwen.pins.model import Pin, PinSet, load, pins_dir, render
from hyperqwen.pins.requires import Needs, load_requires
from hyperqwen.pins.sources import Link, PipSettings, WheelSources
from hyperqwen.pins.transfer import Absent, Access
from hyperqwen.pins.update import (
    Change,
    Update,
    collect_requires,
    compare,
    find_uv,
    parse_packages,
    read_metadata,
    resolve_debs,
    resolve_wheels,
)
from hyperqwen.store import nar_sha256

HASH = "ab" * 32


@pytest.fixture
def groups() -> GroupsFile:
    return load_groups(pins_dir() / "groups.toml")


def wheel(name: str, version: str = "1.0", groups: tuple[str, ...] = ("tools",), sha256: str = HASH) -> Pin:
    return Pin("wheel", name, version, f"{name}-{version}-py3-none-any.whl", 10, sha256, groups)


# A stand-in for uv: pins every input at 2.0, or at what the constraints or the old lock say; notes what it was asked.
UV = """#!{python}
import json, os, re, sys, tomllib
args = sys.argv[1:]
read = lambda name: [line for line in open(name).read().splitlines() if line]
out = args[args.index("--output-file") + 1]
keep = {{}}
if os.path.exists(out):
    keep = {{p["name"]: p["version"] for p in tomllib.load(open(out, "rb"))["packages"]}}
inputs, constraints = read("inputs.in"), read("constraints.txt")
env = {{k: v for k, v in os.environ.items() if k.startswith(("UV_", "SSL_CERT_FILE", "ALL_P"))}}
note = dict(args=args, inputs=inputs, constraints=constraints, keep=keep, env=env)
note.update(overrides=read("overrides.txt"), excludes=read("excludes.txt"))
open({log!r}, "a").write(json.dumps(note) + "\\n")
if "impossible" in inputs:
    sys.exit("no solution found")
fixed = dict(c.split("==") for c in constraints if re.fullmatch(r"[a-z0-9-]+==[0-9.]+", c))
names = sorted({{re.split(r"[=<>\\[]", i)[0] for i in inputs}})
lines = ['lock-version = "1.0"']
for name in names:
    version = fixed.get(name) or keep.get(name) or "2.0"
    lines.append(f'[[packages]]\\nname = "{{name}}"\\nversion = "{{version}}"\\nwheels = [')
    manylinux = ("cp38-abi3-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_99_x86_64")
    for tag in ("cp311-cp311-win_amd64", "py3-none-any", *manylinux):
        file = f"{{name.replace('-', '_')}}-{{version}}-{{tag}}.whl"
        lines.append(f'{{{{url = "http://host.test/a%2Bb/{{file}}", size = 7, hashes = {{{{sha256 = "{hash}"}}}}}}}},')
    lines.append("]")
open(out, "w").write("\\n".join(lines))
"""


@dataclasses.dataclass
class Uv:
    log: Path

    def calls(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Uv:
    log = tmp_path / "uv.log"
    program = tmp_path / "bin" / "uv"
    program.parent.mkdir()
    program.write_text(UV.format(python=sys.executable, log=str(log), hash=HASH))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("UV_INDEX_URL", "http://other.test")
    return Uv(log)


def declared(groups: GroupsFile, **inputs: list[str]) -> GroupsFile:
    """groups.toml with other wheel inputs."""
    changed = {
        name: group.model_copy(update={"inputs": inputs.get(name.replace("-", "_"), ["only"])})
        for name, group in groups.groups.items()
        if group.inputs
    }
    return groups.model_copy(update={"groups": {**groups.groups, **changed}})


def test_all_groups_resolve_as_one_set_and_each_within_it(groups: GroupsFile, uv: Uv) -> None:
    mine = declared(groups, tools=["click", "rich"], kernels=["rich"])
    old = [wheel("click", "1.5"), wheel("gone", "1.0")]
    settings = PipSettings(
        indexes=["http://index.test/simple", "file:///extra"], cert="/ca.pem", proxy="http://p.test:1"
    )
    pins = resolve_wheels(
        mine, old, ["serve-cuda", "serve-cpu", "kernels", "tools", "dev", "build"], settings, upgrade=False
    )
    assert [(pin.name, pin.version, pin.groups) for pin in pins] == [
        ("click", "1.5", ("tools",)),
        ("only", "2.0", ("build", "dev", "serve-cpu", "serve-cuda")),
        ("rich", "2.0", ("kernels", "tools")),
    ]
    union, *each = uv.calls()
    assert sorted(union["inputs"]) == ["click", "only", "only", "only", "only", "rich", "rich"]
    assert union["keep"] == {"click": "1.5", "gone": "1.0"}
    assert len(each) == 6
    for call in each:
        assert {"click==1.5", "only==2.0", "rich==2.0"} <= set(call["constraints"])
    for call in uv.calls():
        assert "nvidia-cuda-nvcc==13.0.*" in call["constraints"]
        assert call["overrides"] == ["torch==2.13.0"] and "torchaudio" in call["excludes"]
        assert call["env"] == {
            "UV_DEFAULT_INDEX": "http://index.test/simple",
            "UV_PYTHON_DOWNLOADS": "never",
            "SSL_CERT_FILE": "/ca.pem",
            "ALL_PROXY": "http://p.test:1",
        }
        assert call["args"][call["args"].index("--python-version") + 1] == "3.11.2"


def test_the_best_wheel_for_the_runtime_is_taken(groups: GroupsFile, uv: Uv) -> None:
    pins = resolve_wheels(declared(groups), [], ["tools"], PipSettings(indexes=["x"]), upgrade=False)
    assert [(pin.file, pin.size, pin.sha256) for pin in pins] == [
        ("only-2.0-cp38-abi3-manylinux_2_28_x86_64.whl", 7, HASH)
    ]


def test_an_upgrade_forgets_versions_and_one_group_leaves_the_others(groups: GroupsFile, uv: Uv) -> None:
    mine = declared(groups, tools=["click", "rich"])
    old = [wheel("click", "1.5"), wheel("rich", "1.0", ("kernels", "tools")), wheel("only", "1.1", ("build",))]
    pins = resolve_wheels(mine, old, ["tools"], PipSettings(indexes=["x"]), upgrade=True)
    assert {pin.name: pin.version for pin in pins} == {"click": "2.0", "rich": "1.0", "only": "1.1"}
    assert uv.calls()[0]["keep"] == {}


def test_what_uv_cannot_resolve_is_shown(groups: GroupsFile, uv: Uv) -> None:
    with pytest.raises(BadInputError, match="no solution found"):
        resolve_wheels(declared(groups, tools=["impossible"]), [], ["tools"], PipSettings(), upgrade=False)


def test_without_uv_the_fix_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "executable", str(_script(tmp_path / "python", "import sys; sys.exit(1)")))
    with pytest.raises(UnsuitableError, match="uv is not on PATH"):
        find_uv()


def _script(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return path


# METADATA


class Index:
    """Canned links and documents in place of an index."""

    def __init__(self, links: Sequence[Link], **documents: bytes) -> None:
        self.found = list(links)
        self.documents = documents
        self.asked: list[str] = []

    def links(self, pin: Pin) -> list[Link]:
        return [link for link in self.found if link.file == pin.file]

    def read(self, url: str) -> tuple[bytes, str, str]:
        self.asked.append(url)
        name = url.rpartition("/")[2].partition("-")[0]
        if name not in self.documents:
            raise Absent(f"{url}: HTTP 404")
        return self.documents[name], "text/plain", url


class Shelf:
    """A store that holds the given files."""

    store_dir = "/nix/store"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def real_path(self, path: str) -> Path:
        return self.folder / path.partition("-")[2]


def make_wheel(folder: Path, metadata: str) -> tuple[Pin, Path]:
    path = folder / "a-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/METADATA", "not this one")
        archive.writestr("a-1.0.dist-info/METADATA", metadata)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Pin("wheel", "a", "1.0", path.name, path.stat().st_size, digest, ("tools",)), path


def read(pin: Pin, index: Index, shelf: Path) -> str:
    return read_metadata(pin, index, index, Shelf(shelf))  # type: ignore[arg-type]


def test_metadata_comes_from_the_store_before_anything_is_asked(tmp_path: Path) -> None:
    pin, path = make_wheel(tmp_path, "Name: a\n")
    index = Index([])
    assert read(pin, index, path.parent) == "Name: a\n"
    assert index.asked == []


def test_metadata_comes_from_beside_the_wheel(tmp_path: Path) -> None:
    pin = wheel("a")
    text = b"Name: a\n"
    link = Link(pin.file, f"http://x.test/{pin.file}", HASH, hashlib.sha256(text).hexdigest())
    index = Index([link], a=text)
    assert read(pin, index, tmp_path) == "Name: a\n"
    assert index.asked == [f"http://x.test/{pin.file}.metadata"]


def test_altered_metadata_is_refused_with_both_hashes(tmp_path: Path) -> None:
    pin = wheel("a")
    with pytest.raises(VerificationError) as caught:
        read(pin, Index([Link(pin.file, f"http://x.test/{pin.file}", HASH, "cd" * 32)], a=b"other"), tmp_path)
    assert "cd" * 32 in str(caught.value) and hashlib.sha256(b"other").hexdigest() in str(caught.value)


def test_metadata_comes_out_of_a_local_wheel(tmp_path: Path) -> None:
    pin, path = make_wheel(tmp_path, "Name: a\n")
    assert read(pin, Index([Link(pin.file, path.as_uri(), pin.sha256)]), tmp_path / "empty") == "Name: a\n"


def test_a_wheel_that_no_index_offers(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match=r"no index offers a-1\.0"):
        read(wheel("a"), Index([]), tmp_path)


def test_requirements_are_read_once_and_again_for_a_new_extra(
    groups: GroupsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    texts = {
        "click": "Requires-Dist: helper[x]\n",
        "helper": "Requires-Dist: deep; extra == 'x'\nRequires-Dist: other; extra == 'y'\n",
        "deep": "",
    }

    def answer(pin: Pin, sources: WheelSources, access: Access, store: object) -> str:
        asked.append(pin.name)
        return texts[pin.name]

    monkeypatch.setattr(module, "read_metadata", answer)
    wheels = [wheel("click"), wheel("helper"), wheel("deep")]
    known = {"helper": Needs(HASH, "", (), {"y": ("other; extra == 'y'",)}), "deep": Needs("cd" * 32)}
    found = collect_requires(wheels, known, groups, PipSettings(), Shelf(tmp_path), lambda text: None)  # type: ignore[arg-type]
    assert sorted(asked) == ["click", "deep", "helper"], "helper's record lacks the extra x, deep's is of another wheel"
    assert found["helper"].extras == {"x": ("deep; extra == 'x'",)}
    asked.clear()
    again = collect_requires(wheels, found, groups, PipSettings(), Shelf(tmp_path), lambda text: None)  # type: ignore[arg-type]
    assert asked == [] and again == found


# .debs


def make_mirror(root: Path, groups: GroupsFile) -> dict[str, str]:
    """A mirror with every declared package; returns the text of its index by package."""
    program = io.BytesIO()
    with tarfile.open(fileobj=program, mode="w:xz") as tar:
        info = tarfile.TarInfo("./bin/busybox")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"\x7fELF"))
    data = program.getvalue()
    deb = b"!<arch>\n" + f"{'data.tar.xz':<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data
    stanzas = {}
    for name in sorted({name for group in groups.groups.values() for name in group.debs}):
        pool = f"pool/main/x/x/{name}_1.0_amd64.deb"
        (root / pool).parent.mkdir(parents=True, exist_ok=True)
        (root / pool).write_bytes(deb)
        stanzas[name] = (
            f"Package: {name}\nVersion: 1:1.0~b\nArchitecture: amd64\nDescription: a: b\n  more: text\n"
            f"Filename: {pool}\nSize: {len(deb)}\nSHA256: {hashlib.sha256(deb).hexdigest()}\n"
        )
    return stanzas


def publish(root: Path, stanzas: dict[str, str], packages: bytes | None = None) -> None:
    body = lzma.compress("\n".join(stanzas.values()).encode()) if packages is None else packages
    real = lzma.compress("\n".join(stanzas.values()).encode())
    target = root / "dists/bookworm/main/binary-amd64"
    target.mkdir(parents=True, exist_ok=True)
    (target / "Packages.xz").write_bytes(body)
    name = "main/binary-amd64/Packages.xz"
    digest = hashlib.sha256(real).hexdigest()
    release = f"Suite: oldstable\nMD5Sum:\n {'0' * 32} 1 {name}\nSHA256:\n {digest} {len(real)} {name}\n"
    (root / "dists/bookworm/InRelease").write_text(release)


@pytest.fixture
def unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_verified_release", lambda signed: signed.decode())


@pytest.mark.usefixtures("unsigned")
def test_debs_come_from_the_index_and_the_seed_gets_its_nar_hash(groups: GroupsFile, tmp_path: Path) -> None:
    publish(tmp_path, make_mirror(tmp_path, groups))
    empty = tmp_path / "empty"
    empty.mkdir()
    pins = resolve_debs(groups, [], [str(empty), str(tmp_path)], lambda sites: Access())
    by_name = {pin.name: pin for pin in pins}
    assert by_name["libc6"].file == "libc6_1-1.0-b_amd64.deb"
    assert by_name["libc6"].version == "1:1.0~b"
    assert by_name["libc6"].groups == ("cc", "libc", "runtime", "stage")
    seed = by_name["busybox-static"].extract
    assert seed is not None and (seed.path, seed.store_name) == ("bin/busybox", "busybox-1.35.0")
    tree = tmp_path / "busybox-1.35.0"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/busybox").write_bytes(b"\x7fELF")
    (tree / "bin/busybox").chmod(0o755)
    assert seed.nar_sha256 == nar_sha256(tree)
    shutil.rmtree(tmp_path / "pool")
    assert resolve_debs(groups, pins, [str(tmp_path)], lambda sites: Access()) == pins, "a known seed is not read again"


@pytest.mark.usefixtures("unsigned")
def test_an_index_that_is_not_the_signed_one_is_refused(groups: GroupsFile, tmp_path: Path) -> None:
    publish(tmp_path, make_mirror(tmp_path, groups), packages=b"altered")
    with pytest.raises(VerificationError, match="expected") as caught:
        resolve_debs(groups, [], [str(tmp_path)], lambda sites: Access())
    assert hashlib.sha256(b"altered").hexdigest() in str(caught.value)


@pytest.mark.usefixtures("unsigned")
def test_a_package_that_the_suite_does_not_have_is_named(groups: GroupsFile, tmp_path: Path) -> None:
    stanzas = make_mirror(tmp_path, groups)
    stanzas.pop("libisl23")
    publish(tmp_path, stanzas)
    with pytest.raises(MissingError, match="no package 'libisl23'"):
        resolve_debs(groups, [], [str(tmp_path)], lambda sites: Access())
    with pytest.raises(MissingError, match="no mirror has bookworm main"):
        resolve_debs(groups, [], [str(tmp_path / "nowhere")], lambda sites: Access())


def test_a_release_file_without_a_signature_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keyring = tmp_path / "keyring.gpg"
    monkeypatch.setattr(module, "_ARCHIVE_KEYRING", keyring)
    with pytest.raises(UnsuitableError, match="debian-archive-keyring"):
        module._verified_release(b"Suite: x\n")
    keyring.write_bytes(b"")
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(UnsuitableError, match="gpgv"):
        module._verified_release(b"Suite: x\n")
    _script(programs / "gpgv", "import sys; sys.exit('gpgv: no signature found')")
    with pytest.raises(VerificationError, match="no signature found"):
        module._verified_release(b"Suite: x\n")
    _script(programs / "gpgv", "import sys; a = sys.argv; open(a[a.index('--output') + 1], 'w').write('checked')")
    assert module._verified_release(b"Suite: x\n") == "checked"


def test_a_packages_index_keeps_every_stanza() -> None:
    text = "Package: a\nVersion: 1\nDescription: x\n y: z\n\nPackage: a\nVersion: 2\n\n\nPackage: b\nVersion: 3\n"
    assert parse_packages(text) == {
        "a": [{"Package": "a", "Version": "1", "Description": "x"}, {"Package": "a", "Version": "2"}],
        "b": [{"Package": "b", "Version": "3"}],
    }


# The result


def test_changes_are_told_apart() -> None:
    old = PinSet((wheel("a"), wheel("b"), wheel("d")), ())
    new = PinSet((wheel("a", "2.0"), wheel("c"), dataclasses.replace(wheel("d"), groups=("build", "tools"))), ())
    assert [change.line() for change in compare(old, new)] == [
        "~ a 1.0 → 2.0  (+0 B; tools)",
        "- b 1.0  (-10 B)",
        "+ c 1.0  (+10 B; tools)",
        "~ d 1.0: other file or groups  (+0 B; build, tools)",
    ]
    assert compare(old, old) == []


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "pins"
    shutil.copytree(pins_dir(), folder)
    return folder


def test_only_what_changed_is_written_and_nothing_is_left(copied: Path) -> None:
    pins = load(copied)
    fewer = dataclasses.replace(pins, wheels=pins.wheels[1:])
    needs = load_requires(copied / "requires.json")
    before = (copied / "debs.json").stat().st_mtime_ns
    assert [path.name for path in Update(copied, fewer, needs).write()] == ["wheels.json"]
    assert (copied / "wheels.json").read_text() == render(fewer, "wheel")
    assert (copied / "debs.json").stat().st_mtime_ns == before
    assert Update(copied, fewer, needs).write() == []
    assert {path.name for path in copied.iterdir()} == {"groups.toml", "wheels.json", "debs.json", "requires.json"}


def test_a_folder_that_cannot_be_written_is_one_error(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = load(copied)
    texts = {path.name: path.read_text() for path in copied.iterdir()}

    def refuse(source: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    update = Update(copied, dataclasses.replace(pins, wheels=pins.wheels[1:]), {})
    with pytest.raises(UnsuitableError, match="Read-only file system"):
        update.write()
    assert {path.name: path.read_text() for path in copied.iterdir()} == texts


def test_pins_that_do_not_hold_are_not_written(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = load(copied)
    monkeypatch.setattr(module, "pip_settings", lambda index: PipSettings())
    monkeypatch.setattr(module, "resolve_wheels", lambda *args, **how: pins.wheels[1:])
    with pytest.raises(VerificationError, match="nothing is written") as caught:
        module.update(copied, groups=["tools"], say=lambda text: None)
    assert pins.wheels[0].name in str(caught.value)


def test_an_update_of_the_same_is_no_change(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pins = load(copied)
    monkeypatch.setattr(module, "pip_settings", lambda index: PipSettings())
    monkeypatch.setattr(module, "resolve_wheels", lambda *args, **how: list(pins.wheels))
    said: list[str] = []
    result = module.update(copied, groups=["tools", "kernels"], say=said.append)
    assert result.changes == [] and result.write() == []
    assert said == ["resolving kernels, tools with uv"], "what is recorded is not read again"


def test_an_unknown_group_is_named(copied: Path) -> None:
    with pytest.raises(BadInputError, match="'desktop' does not exist"):
        module.update(copied, groups=["desktop"], say=lambda text: None)


def test_a_change_is_data(copied: Path) -> None:
    assert dataclasses.asdict(Change("wheel", "a", None, "1", 0, 5, ("tools",)))["new_size"] == 5
