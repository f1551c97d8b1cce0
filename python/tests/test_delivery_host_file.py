"""A host file from JSON: what the layers accept is written whole, anything else refused in the settings' own words."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.delivery import host_file
from hyperqwen.delivery.host_file import in_settings, main, make, render
from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.planner import Plan, make_plan
from hyperqwen.profiles.rules import Notice

WHERE = "services.hyperqwen.settings"

keys = st.text(min_size=1, max_size=20)
scalars = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.dictionaries(keys, st.dictionaries(keys, scalars | st.lists(scalars, max_size=4), max_size=4), max_size=4))
def test_toml_says_what_the_json_said(settings: dict[str, Any]) -> None:
    assert tomllib.loads(render(json.dumps(settings), WHERE)) == settings


def test_the_file_is_what_the_server_reads(tmp_path: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "limits": {"context_tokens": 32768},
        "memory": {"utilization": 0.9},
        "cache": {"retention": 13056, "prefix": False},
        "engine": {"arguments": ["--seed", "two words"]},
    }
    out = tmp_path / "host.toml"
    make("D", json.dumps(settings), WHERE, out)
    found = resolve("D", host_file=out, environ={})
    for section, values in settings.items():
        for key, value in values.items():
            assert found.profile.get(f"{section}.{key}") == value
    assert {path for path, source in found.sources.items() if source.kind == "host file"} == {
        f"{section}.{key}" for section, values in settings.items() for key in values
    }
    assert [path.name for path in tmp_path.iterdir()] == ["host.toml"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"limits": {"context_token": 5}}', f"1 problem in {WHERE}:\n  limits.context_token is not a field; did you"),
        ('{"limits": {"context_tokens": "5"}}', "limits.context_tokens is '5' (text); it must be a valid integer"),
        ('{"cache": {"dtype": "fp9"}, "limit": {}}', f"2 problems in {WHERE}:"),
        ('{"limits": 3}', "limits is 3 (a whole number)"),
        ('{"limits": {"context_tokens": null}, "memory": null}', f"{WHERE}.memory is null"),
        ('{"name": "X"}', f"{WHERE} sets name, which only a profile has"),
        ('{"parallel": {"tensor": 3}}', f"parallel.tensor is 3 ({WHERE}): num_key_value_heads of qwen3.8-27b is 4"),
        ('{"engine": {"arguments": ["--api-key", "k"]}}', f"engine.arguments is --api-key ({WHERE}): every user"),
        ("[]", f"{WHERE} is []"),
        ("{", f"{WHERE} is not JSON"),
    ],
)
def test_wrong_settings_are_refused_and_leave_no_file(tmp_path: Path, settings: str, message: str) -> None:
    out = tmp_path / "host.toml"
    out.write_text("what was there\n")
    with pytest.raises(BadInputError) as caught:
        make("B", settings, WHERE, out)
    assert message in caught.value.message
    assert str(tmp_path) not in str(caught.value)
    assert out.read_text() == "what was there\n"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("fix", "said"),
    [
        ("use --context 8192", f"use {WHERE}.limits.context_tokens = 8192"),
        (
            "use --memory-kv-cache-bytes 0 --context 4096",
            f"use {WHERE}.memory.kv_cache_bytes = 0 and {WHERE}.limits.context_tokens = 4096",
        ),
        (
            "use more cards (--parallel-tensor 2), or --cache-prefix false",
            f"use more cards ({WHERE}.parallel.tensor = 2), or {WHERE}.cache.prefix = false",
        ),
        (
            "use --speculation-method mtp, or name a drafter: --model-drafter",
            f'use {WHERE}.speculation.method = "mtp", or name a drafter: {WHERE}.model.drafter',
        ),
        ("use --port 18021, or --host", "use services.hyperqwen.port = 18021, or services.hyperqwen.host"),
        ("name cards with --parallel-gpus or none", "name cards with services.hyperqwen.gpus or none"),
        ("take --api-key out", "take --api-key out"),
    ],
)
def test_a_fix_names_settings_and_no_flags(fix: str, said: str) -> None:
    assert in_settings(fix, WHERE) == said


def test_what_a_plan_says_of_a_flag_is_said_of_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the refusals that name a flag, each needs a card or a drafter, which a build does not have: one is added."""
    notice = Notice("refuse", "memory", "limits.context_tokens", 9999, "9999 tokens do not fit", "use --context 8192")

    def planned(*arguments: Any, **more: Any) -> Plan:
        plan = make_plan(*arguments, **more)
        return replace(plan, notices=(*plan.notices, notice))

    monkeypatch.setattr(host_file, "make_plan", planned)
    with pytest.raises(BadInputError) as caught:
        make("B", "{}", WHERE, tmp_path / "host.toml")
    assert str(caught.value) == f"9999 tokens do not fit\n  fix: use {WHERE}.limits.context_tokens = 8192"
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="there is no profile 'Z'"):
        make("Z", "{}", WHERE, tmp_path / "host.toml")


def test_the_command_ends_as_its_error_says(tmp_path: Path) -> None:
    out = tmp_path / "host.toml"
    arguments = ["--profile", "B", "--where", WHERE, "--out", str(out), "--settings"]
    result = CliRunner().invoke(main, [*arguments, '{"server": {"port": 70000}}'])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"hyperqwen: 1 problem in {WHERE}:\n  server.port is 70000")
    assert not out.exists()
    assert CliRunner().invoke(main, [*arguments, '{"server": {"port": 7000}}']).exit_code == 0
    assert tomllib.loads(out.read_text()) == {"server": {"port": 7000}}
