from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.profiles.layers import find, read_text, redacted, resolve, shown
from hyperqwen.profiles.profile import Knob, knobs, shipped

BY_PATH = {knob.path: knob for knob in knobs()}
CONTEXT = "limits.context_tokens"
VARIABLE = "HYPERQWEN_LIMITS_CONTEXT_TOKENS"


@pytest.fixture
def host(tmp_path: Path) -> Path:
    file = tmp_path / "host.toml"
    file.write_text("[limits]\ncontext_tokens = 3000\nconcurrent_requests = 3\n")
    return file


def refused(**layers: object) -> str:
    with pytest.raises(BadInputError) as raised:
        resolve("B", **layers)  # type: ignore[arg-type]
    return str(raised.value)


def test_the_later_layer_wins_and_is_named(host: Path) -> None:
    steps = [
        ({}, 65536, "profile B"),
        ({"host_file": host}, 3000, f"host file {host}"),
        ({"host_file": host, "environ": {VARIABLE: "4000"}}, 4000, f"environment {VARIABLE}"),
        (
            {"host_file": host, "environ": {VARIABLE: "4000"}, "flags": {CONTEXT: "5000"}},
            5000,
            "flag --limits-context-tokens",
        ),
    ]
    for layers, value, source in steps:
        found = resolve("B", **layers)  # type: ignore[arg-type]
        assert (found.profile.get(CONTEXT), str(found.sources[CONTEXT])) == (value, source)
    assert str(found.sources["limits.concurrent_requests"]) == f"host file {host}"
    assert str(found.sources["limits.batched_tokens"]) == "default"


def test_a_host_file_keeps_what_it_does_not_name(host: Path) -> None:
    assert resolve("B", host_file=host).profile.speculation.tokens == 7


def test_the_variable_names_the_host_file(host: Path) -> None:
    assert resolve("B", environ={"HYPERQWEN_HOST_FILE": str(host)}).profile.limits.context_tokens == 3000
    with pytest.raises(MissingError, match="nothing-here"):
        resolve("B", environ={"HYPERQWEN_HOST_FILE": "/nothing-here.toml"})
    assert "HYPERQWEN_HOST_FILE is empty" in refused(environ={"HYPERQWEN_HOST_FILE": ""})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[limits]\ncontex_tokens = 1\n", "did you mean 'context_tokens'"),
        ("[limits]\ncontext_tokens = '1'\n", "limits.context_tokens is '1' (text)"),
        ("limits = 3\n", "limits is 3"),
        ("name = 'B'\n", "sets name, which only a profile has"),
        ("device = 'cpu'\n", "sets device"),
        ("[limits", "is not TOML"),
    ],
)
def test_a_wrong_host_file_is_blamed_by_name(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "host.toml"
    file.write_text(text)

    message = refused(host_file=file)

    assert said in message
    assert str(file) in message


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        (VARIABLE, "many", "limits.context_tokens is 'many'; use a whole number from 16 to 1010000"),
        (VARIABLE, "3", "limits.context_tokens is 3 (a whole number)"),
        (VARIABLE, "4_096", "limits.context_tokens is '4_096'"),
        (VARIABLE, " 4096", "limits.context_tokens is ' 4096'"),
        (VARIABLE, "", "limits.context_tokens is ''"),
        ("HYPERQWEN_MEMORY_UTILIZATION", "nan", "memory.utilization is 'nan'"),
        ("HYPERQWEN_MEMORY_UTILIZATION", "1e-1", "memory.utilization is '1e-1'"),
        ("HYPERQWEN_CACHE_DTYPE", "bfloat", "did you mean bfloat16?"),
        ("HYPERQWEN_CACHE_RETENTION", "dence", "did you mean dense?"),
        ("HYPERQWEN_ENGINE_ARGUMENTS", "'a", "engine.arguments"),
        ("HYPERQWEN_LIMITS_CONTEXT", "1", "did you mean HYPERQWEN_LIMITS_CONTEXT_TOKENS?"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, text: str, said: str) -> None:
    message = refused(environ={variable: text})

    assert said in message
    assert variable in message


@pytest.mark.parametrize("text", ["yes", "on", "True", "TRUE", "no", "off", "y", "", " true", "2"])
def test_other_spellings_of_a_truth_value_are_refused(text: str) -> None:
    message = refused(environ={"HYPERQWEN_CACHE_PREFIX": text})

    assert f"cache.prefix is {text!r}; use true or false (or 1 or 0)" in message


@pytest.mark.parametrize(("text", "value"), [("true", True), ("1", True), ("false", False), ("0", False)])
def test_the_documented_spellings_of_a_truth_value(text: str, value: bool) -> None:
    assert resolve("B", environ={"HYPERQWEN_CACHE_PREFIX": text}).profile.cache.prefix is value


def test_all_problems_of_variables_and_flags_come_together() -> None:
    message = refused(environ={VARIABLE: "x", "HYPERQWEN_TYPO": "1"}, flags={"cache.dtype": "fp9"})

    for part in (VARIABLE, "HYPERQWEN_TYPO", "--cache-dtype"):
        assert part in message


def test_variables_of_others_and_of_the_demo_are_left_alone() -> None:
    resolve("B", environ={"HYPERQWENX": "1", "HYPERQWEN_DEMO_PORT": "1", "PATH": "/x", "HYPERQWEN_API_KEY": "k"})


def test_profiles_are_found_by_name_title_and_file(tmp_path: Path) -> None:
    assert find("b") == find("B") == find("single") == shipped()["B"]
    assert find("./mine.toml") == Path("mine.toml")
    file = tmp_path / "mine.toml"
    file.write_text(shipped()["B"].read_text().replace('name = "B"', 'name = "mine"'))
    found = resolve(file)
    assert (found.profile.name, str(found.sources[CONTEXT])) == ("mine", "profile mine")
    with pytest.raises(MissingError, match="did you mean single"):
        find("singel")


def values(knob: Knob) -> st.SearchStrategy[object]:
    low, high = knob.minimum or 0, min(knob.maximum or 10**12, 10**12)
    numbers = st.integers(int(low), int(high))
    return {
        "bool": st.booleans(),
        "int": numbers,
        "float": st.floats(0.01, 0.98).map(lambda x: round(x, 3)),
        "text": st.text(),
        "list": st.lists(st.text()),
        "choice": st.sampled_from(knob.choices or ("",)),
        "choice or int": st.one_of(st.sampled_from(knob.choices or ("",)), numbers),
    }[knob.kind]


@given(st.data())
def test_a_value_that_is_shown_reads_back(data: st.DataObject) -> None:
    knob = data.draw(st.sampled_from(knobs()))
    value = data.draw(values(knob))

    assert read_text(knob, shown(knob, value)) == value


def test_secrets_are_shown_by_length() -> None:
    assert redacted("hunter2") == "set (7 characters)"
    assert redacted("") == "not set"


@pytest.mark.parametrize("name", ["server.port", "memory.utilization", "cache.retention"])
def test_a_number_of_thousands_of_digits_is_refused(name: str) -> None:
    knob = next(knob for knob in knobs() if knob.path == name)
    with pytest.raises(BadInputError, match=name):
        read_text(knob, "1" * 5000)
