from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.profiles.arguments import FORBIDDEN, PLANNED, parse, secrets, without
from hyperqwen.profiles.argv import ModelPaths, engine_flags
from hyperqwen.profiles.profile import Profile, knobs, load, shipped


@pytest.mark.parametrize(
    ("words", "name", "values"),
    [
        (["--max-model-len", "8192"], "--max-model-len", ("8192",)),
        (["--max-model-len=8192"], "--max-model-len", ("8192",)),
        (["--max_model_len", "8192"], "--max-model-len", ("8192",)),
        (["--max-model", "8192"], "--max-model-len", ("8192",)),
        (["--api_k=secret"], "--api-key", ("secret",)),
        (["--ud", "socket"], "--uds", ("socket",)),
        (["-tp", "2"], "--tensor-parallel-size", ("2",)),
        (["-tp=2"], "--tensor-parallel-size", ("2",)),
        (["-O3"], "--optimization-level", ("3",)),
        (["-t", "3"], "--tensor-parallel-size", ("3",)),
        (["-t=3"], "--tensor-parallel-size", ("3",)),
        (["-s", "{}"], "--speculative-config", ("{}",)),
        (["-c", "{}"], "--compilation-config", ("{}",)),
        (["-qfp8"], "--quantization", ("fp8",)),
        (["-dp", "2"], "--data-parallel-size", ("2",)),
        (["-dpa", "x"], "--data-parallel-address", ("x",)),
        (["-dcp", "2"], "--decode-context-parallel-size", ("2",)),
        (["-n2"], "--nnodes", ("2",)),
        (["-a", "x"], "-a", ("x",)),
        (["-O", "3"], "--optimization-level", ("3",)),
        (["--compilation-config.cudagraph_mode", "FULL"], "--compilation-config", ("FULL",)),
        (["--compilation_config.cudagraph_mode=FULL"], "--compilation-config", ("FULL",)),
        (["--served-model-name", "a", "b"], "--served-model-name", ("a", "b")),
        (["--seed", "-1"], "--seed", ("-1",)),
        (["--max-logprobs", "5"], "--max-logprobs", ("5",)),
    ],
)
def test_a_flag_in_every_spelling_that_the_engine_reads(words: list[str], name: str, values: tuple[str, ...]) -> None:
    (flag,) = parse(words)

    assert (flag.name, flag.values, flag.negated) == (name, values, False)


def test_negation_is_told_apart() -> None:
    on, off, short = parse(["--language-model-only", "--no_language_model_only", "--no-lang"])

    assert {on.name, off.name, short.name} == {"--language-model-only"}
    assert (on.negated, off.negated, short.negated) == (False, True, True)


def test_a_value_that_is_no_number_counts_as_0() -> None:
    assert [flag.number for flag in parse(["-pp", "3", "-tp", "two", "--block-size"])] == [3, 0, 0]


def test_words_before_the_first_flag_are_no_flag() -> None:
    assert [flag.name for flag in parse(["word", "--seed", "1"])] == ["--seed"]
    assert parse([]) == []


@given(st.lists(st.sampled_from(["--seed", "-tp", "--host=x", "1", "two", "{}", "-1", "--no-async-scheduling"])))
def test_taking_a_flag_out_leaves_the_others(words: list[str]) -> None:
    flags = parse(words)
    for flag in flags:
        left = parse(without(words, flag))
        assert [other.spelled for other in left] == [other.spelled for other in flags if other is not flag]
        assert len(without(words, flag)) == len(words) - (flag.span[1] - flag.span[0])


def variations() -> list[Profile]:
    """Every shipped profile, and each with each knob at each of its other values."""
    found = []
    for path in shipped().values():
        profile = load(path)
        found.append(profile)
        for knob in knobs():
            choices = (
                [True, False] if knob.kind == "bool" else list(knob.choices) + ([7, 2] if "int" in knob.kind else [])
            )
            for value in choices:
                if knob.maximum is not None and isinstance(value, int) and value > knob.maximum:
                    continue
                if knob.minimum is not None and isinstance(value, int) and value < knob.minimum:
                    continue
                found.append(profile.with_values({knob.path: value}))
    return found


def test_every_flag_of_a_plan_is_known_here() -> None:
    """A flag that the plan sets and this table lacks could be shadowed without a word."""
    paths = ModelPaths(Path("/models/m"), Path("/models/d"))
    planned = {flag.name for profile in variations() for flag in parse(engine_flags(profile, paths))}

    assert planned - set(PLANNED) - set(FORBIDDEN) == set()
    assert {"--max-model-len", "--kv-offloading-size", "--enforce-eager", "--tensor-parallel-size"} <= planned


def test_knobs_named_for_flags_exist() -> None:
    assert {knob for knob in PLANNED.values() if knob is not None} <= {knob.path for knob in knobs()}


def test_keys_are_found_in_every_spelling() -> None:
    words = ["--api-key", "a", "b", "--seed", "1", "--api_key=c", "--api", "d", "--hf-tok", "e", "--api-k", "-f"]
    assert secrets(words) == ["a", "b", "c", "d", "e", "-f"]
    assert secrets(["--seed", "1", "--api-server-count", "2"]) == []
