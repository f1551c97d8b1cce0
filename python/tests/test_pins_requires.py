"""Reading METADATA, following requirements, and what is kept of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from packaging.tags import Tag

from hyperqwen.errors import BadInputError
from hyperqwen.pins.groups import GroupsFile, load_groups
from hyperqwen.pins.model import pins_dir
from hyperqwen.pins.requires import (
    Metadata,
    Needs,
    active,
    condense,
    load_requires,
    parse_metadata,
    render_requires,
    walk,
)


@pytest.fixture
def groups() -> GroupsFile:
    return load_groups(pins_dir() / "groups.toml")


def test_metadata_is_read_up_to_its_description() -> None:
    text = (
        "Metadata-Version: 2.4\nName: a\nRequires-Python: >=3.10\nRequires-Dist: b>1\n"
        "Requires-Dist: c; extra == 'x'\n\nRequires-Dist: not-this\n"
    )
    assert parse_metadata(text, "a.whl") == Metadata(">=3.10", ("b>1", "c; extra == 'x'"))
    assert parse_metadata("Name: a\n", "a.whl") == Metadata("", ())


def test_metadata_with_nonsense_names_its_wheel() -> None:
    with pytest.raises(BadInputError, match=r"a\.whl: METADATA requires '>>'"):
        parse_metadata("Requires-Dist: >>\n", "a.whl")


def test_markers_are_those_of_the_runtime(groups: GroupsFile) -> None:
    texts = [
        "always",
        "linux; sys_platform == 'linux'",
        "windows; os_name == 'nt'",
        "old; python_version < '3.11'",
        "patch; python_full_version >= '3.11.2'",
        "arm; platform_machine == 'aarch64'",
        "x; extra == 'x'",
        "x-windows; extra == 'x' and os_name == 'nt'",
        "both; extra == 'x' or sys_platform == 'linux'",
    ]
    assert [text.partition(";")[0] for text in active(texts, groups)] == ["always", "linux", "patch", "both"]
    assert [text.partition(";")[0] for text in active(texts, groups, "x")] == ["x"]


def test_tags_go_from_the_best_to_the_most_general(groups: GroupsFile) -> None:
    rank = {tag: position for position, tag in enumerate(groups.tags())}
    order = [
        Tag("cp311", "cp311", "manylinux_2_36_x86_64"),
        Tag("cp311", "cp311", "manylinux_2_17_x86_64"),
        Tag("cp311", "cp311", "manylinux2014_x86_64"),
        Tag("cp311", "cp311", "linux_x86_64"),
        Tag("cp311", "abi3", "manylinux_2_28_x86_64"),
        Tag("cp38", "abi3", "manylinux_2_28_x86_64"),
        Tag("py3", "none", "manylinux_2_17_x86_64"),
        Tag("py3", "none", "any"),
    ]
    assert [rank[tag] for tag in order] == sorted(rank[tag] for tag in order)
    for tag in (Tag("cp312", "cp312", "manylinux_2_17_x86_64"), Tag("cp311", "cp311", "manylinux_2_37_x86_64")):
        assert tag not in rank


def test_the_walk_follows_extras_overrides_and_exclusions(groups: GroupsFile) -> None:
    wheels = {
        "a": {"": ["B[fast]>1", "torch==2.13.0+cpu", "torchaudio"], "fast": []},
        "b": {"": ["c"], "fast": ["d"]},
        "c": {"": ["a"]},
    }
    seen = walk(["a"], groups, lambda name, extra: wheels.get(name, {}).get(extra), "input")
    assert seen.extras == {"a": {""}, "b": {"", "fast"}, "c": {""}, "d": {""}, "torch": {""}}
    asked = {(who, str(requirement)) for who, requirement in seen.asked}
    assert asked == {
        ("input", "a"),
        ("a", "B[fast]>1"),
        ("b", "c"),
        ("b[fast]", "d"),
        ("c", "a"),
        ("a", "torch==2.13.0"),
    }


def test_only_what_someone_asks_for_is_kept(groups: GroupsFile) -> None:
    metadata = {
        "click": Metadata(">=3.10", ("helper[used]", "never; os_name == 'nt'")),
        "helper": Metadata("", ("x; extra == 'used'", "y; extra == 'unused'")),
    }
    hashes = {"click": "ab" * 32, "helper": "cd" * 32}
    assert condense(metadata, hashes, groups) == {
        "click": Needs("ab" * 32, ">=3.10", ("helper[used]",), {}),
        "helper": Needs("cd" * 32, "", (), {"used": ("x; extra == 'used'",)}),
    }


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    needs = {
        "b": Needs("ab" * 32, ">=3.9", ("a>1; python_version < '4'",), {"x": ("c",), "y": ()}),
        "a": Needs("cd" * 32),
    }
    path = tmp_path / "requires.json"
    path.write_text(render_requires(needs))
    assert load_requires(path) == needs
    assert list(json.loads(path.read_text())["wheels"]) == ["a", "b"]


def test_the_committed_file_is_canonical() -> None:
    path = pins_dir() / "requires.json"
    assert path.read_text() == render_requires(load_requires(path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "must hold"),
        ('{"schema": 2, "wheels": {}}', "must hold"),
        ('{"schema": 1, "wheels": {"a": {}}}', "'a' is malformed"),
        ('{"schema": 1, "wheels": {"a": {"sha256": 1}}}', "'a' is malformed"),
        ('{"schema": 1, "wheels": {"a": {"sha256": "x", "requires": "b"}}}', "'a' is malformed"),
        ('{"schema": 1, "wheels": {"a": {"sha256": "x", "requires": [">>"]}}}', "'a' is malformed"),
        ('{"schema": 1, "wheels": {"a": 3}}', "'a' is malformed"),
    ],
)
def test_a_damaged_file_says_where(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "requires.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match="pins update") as caught:
        load_requires(path)
    assert words in str(caught.value)
