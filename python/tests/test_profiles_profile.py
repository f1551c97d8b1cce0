from __future__ import annotations

import os
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.profiles.profile import Knob, Profile, knobs, load, parse, sections, shipped

TEXT = """
name = "X"
title = "trial"
summary = "a profile"
device = "cuda"
[server]
port = 18020
[limits]
context_tokens = 2048
threads = 1
[cache]
prefix = true
retention = "dense"
"""


def parsed(text: str) -> Profile:
    return parse(tomllib.loads(text), "p.toml")


def problems(text: str) -> str:
    with pytest.raises(BadInputError) as raised:
        parsed(text)
    return str(raised.value)


def test_a_profile_is_read_and_the_rest_has_defaults() -> None:
    profile = parsed(TEXT)

    assert (profile.name, profile.limits.context_tokens, profile.memory.utilization) == ("X", 2048, 0.93)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("context_tokens", "context_token", "limits.context_token is not a field; did you mean 'context_tokens'?"),
        ("[cache]", "[cash]", "cash is not a field; did you mean 'cache'?"),
        ("port = 18020", 'port = "18020"', "server.port is '18020' (text)"),
        ("port = 18020", "port = 0", "server.port is 0 (a whole number); it must be greater than or equal to 1"),
        ("port = 18020", "port = 65536", "server.port is 65536"),
        ("threads = 1", "threads = true", "limits.threads is True (a truth value)"),
        ("threads = 1", "threads = 1.0", "limits.threads is 1.0 (a number)"),
        ('device = "cuda"', 'device = "tpu"', "device is 'tpu' (text); it must be 'cuda' or 'cpu'"),
        ('name = "X"', 'name = "-x"', "name is '-x'"),
        ("prefix = true", 'prefix = "true"', "cache.prefix is 'true' (text)"),
        ("prefix = true", 'prefix = "yes"', "cache.prefix is 'yes' (text)"),
        ("prefix = true", "prefix = 1", "cache.prefix is 1 (a whole number)"),
        ('title = "trial"', "", "title is missing; add it"),
        ("threads = 1", "threads = 1\ncolour = 2", "limits.colour is not a field; remove it, or use one of:"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(old: str, new: str, said: str) -> None:
    assert old in TEXT
    assert said in problems(TEXT.replace(old, new))


def test_all_problems_are_reported_together() -> None:
    text = TEXT.replace("port = 18020", "port = -1").replace("threads", "thread").replace('device = "cuda"', "")

    said = problems(text)

    assert said.startswith("3 problems in p.toml:")
    for part in ("server.port is -1", "limits.thread is not a field", "device is missing"):
        assert part in said


@pytest.mark.parametrize("value", ['"dense"', '"end"', "1", "13056"])
def test_retention_is_a_word_or_a_number(value: str) -> None:
    assert parsed(TEXT.replace('"dense"', value)).cache.retention == tomllib.loads(f"x = {value}")["x"]


@pytest.mark.parametrize("value", ['"sparse"', "0", "-1", "true", "1.5"])
def test_retention_is_nothing_else(value: str) -> None:
    assert "cache.retention" in problems(TEXT.replace('"dense"', value))


def test_values_are_replaced_by_path_and_validated() -> None:
    profile = parsed(TEXT)

    assert profile.with_values({"limits.context_tokens": 4096}).get("limits.context_tokens") == 4096
    with pytest.raises(ValueError, match="context_tokens"):
        profile.with_values({"limits.context_tokens": 1})


def test_files(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    with pytest.raises(MissingError, match="does not exist"):
        load(file)
    with pytest.raises(MissingError, match="does not exist"):
        load(tmp_path)
    file.write_bytes(b'name = "\xff"')
    with pytest.raises(BadInputError, match="not UTF-8"):
        load(file)
    file.write_text("[server")
    with pytest.raises(BadInputError, match="is not TOML"):
        load(file)
    file.write_text(TEXT)
    assert load(file).title == "trial"


# Knobs ----------------------------------------------------------------------------------------------------------------


def test_the_shipped_profiles_are_sound() -> None:
    assert list(shipped()) == ["A", "B", "C", "D", "E", "demo"]
    for name, path in shipped().items():
        assert load(path).name == name


def test_every_knob_is_described_once_and_has_names_of_its_own() -> None:
    found = knobs()

    assert {knob.section for knob in found} == set(sections())
    for names in ([k.path for k in found], [k.flag for k in found], [k.variable for k in found]):
        assert len(set(names)) == len(names)
    aliases = [knob.alias for knob in found if knob.alias]
    assert len(set(aliases)) == len(aliases)
    for knob in found:
        assert knob.description.endswith("."), knob.path
        assert len(knob.description) <= 140, knob.path


def test_a_knob_says_what_it_takes() -> None:
    by_path = {knob.path: knob for knob in knobs()}

    assert by_path["server.port"].accepts == "a whole number from 1 to 65535"
    assert by_path["cache.prefix"].accepts == "true or false"
    assert by_path["memory.utilization"].accepts == "a number above 0 to 0.99"
    assert by_path["cache.retention"].accepts == "dense, end, or a whole number from 1 to 16777216"
    assert by_path["limits.context_tokens"].variable == "HYPERQWEN_LIMITS_CONTEXT_TOKENS"
    assert by_path["limits.context_tokens"].flag == "--limits-context-tokens"


def _outside(knob: Knob) -> list[object]:
    wrong: list[object] = []
    if knob.minimum is not None:
        wrong.append(knob.minimum if knob.open_minimum else knob.minimum - 1)
    if knob.maximum is not None:
        wrong.append(knob.maximum + 1)
    return wrong


def test_the_ranges_that_knobs_state_are_the_ones_that_hold() -> None:
    profile = parsed(TEXT)
    tried = 0
    for knob in knobs():
        for value in _outside(knob):
            tried += 1
            with pytest.raises(ValueError, match=knob.key):
                profile.with_values({knob.path: value})
    assert tried > 20


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.path)
def test_a_value_of_another_type_is_refused(knob: Knob) -> None:
    wrong: list[object] = [{"a": 1}, None] + ([] if knob.kind == "list" else [[]])
    wrong += {"bool": [1, "true", "yes"], "int": ["1", 1.5, True], "float": ["0.5", True]}.get(knob.kind, [7.5])
    for value in wrong:
        with pytest.raises(ValueError, match=knob.key):
            parsed(TEXT).with_values({knob.path: value})


def test_profiles_differ_from_each_other() -> None:
    profiles = [load(path).model_dump(exclude={"name", "title", "summary"}) for path in shipped().values()]
    for first, second in pairwise(profiles):
        assert first != second


@pytest.mark.parametrize("text", [f"x = {'1' * 5000}\n", f"x = {'[' * 5000}"], ids=["digits", "nested"])
def test_toml_that_python_cannot_hold_is_the_users_mistake(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.toml"
    file.write_text(text)
    with pytest.raises(BadInputError, match=r"x\.toml is not TOML"):
        load(file)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.toml")
    with pytest.raises(BadInputError, match=r"x\.toml is no file"):
        load(tmp_path / "x.toml")


NAMES = ("model.name", "model.served_name")


def test_every_whole_number_has_an_end_and_no_text_a_control_character() -> None:
    assert [knob.path for knob in knobs() if "int" in knob.kind and knob.maximum is None] == []
    profile = load(shipped()["B"])
    for knob in knobs():
        if knob.kind in ("text", "list"):
            for letter in "\0\n\x1b\x85":
                text = f"a{letter}b"
                with pytest.raises(
                    ValueError, match="has the control character" if knob.path not in NAMES else "pattern"
                ):
                    profile.with_values({knob.path: [text] if knob.kind == "list" else text})


def test_one_mistake_is_one_line() -> None:
    with pytest.raises(BadInputError) as raised:
        parse(tomllib.loads(TEXT) | {"cache": {"retention": "x"}, "model": {"name": "a b"}}, "x.toml")
    assert str(raised.value).splitlines() == [
        "2 problems in x.toml:",
        "  model.name is 'a b' (text); it must match pattern '^[A-Za-z0-9][A-Za-z0-9._-]*$'",
        "  cache.retention is 'x' (text); it must be 'dense' or 'end', or must be a valid integer",
    ]


def test_a_number_too_long_to_be_printed() -> None:
    with pytest.raises(BadInputError, match=r"port is a number of 20,000 bits"):
        parse(tomllib.loads(TEXT) | {"server": {"port": int("f" * 5000, 16)}}, "x.toml")
