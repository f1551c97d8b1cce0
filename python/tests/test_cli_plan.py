from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyperqwen.cli import main
from hyperqwen.profiles.profile import knobs, shipped


def run(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, env={"HYPERQWEN_HOST_FILE": None, **environ}, prog_name="hyperqwen")


@pytest.mark.parametrize("name", [name for name in shipped() if name != "E"])
def test_every_profile_has_a_plan(name: str) -> None:
    result = run("plan", name)

    assert result.exit_code == 0, result.output
    for part in ("KV cache pool", "Margin", "A request", "The pool", "Longest context"):
        assert part in result.output


def test_a_refused_plan_is_shown_and_ends_with_2() -> None:
    result = run("plan", "B", "--context", "200000")

    assert result.exit_code == 2
    assert "refuse limits.context_tokens is 200000" in result.output
    assert "KV cache pool" in result.output


def test_the_card_changes_the_plan() -> None:
    small, large = (json.loads(run("plan", "A", "--gpu", gpu, "--json").output) for gpu in ("rtx3090", "rtx5090"))

    assert small["budget"]["pool"]["tokens"] < large["budget"]["pool"]["tokens"]
    assert small["card"]["name"] == "rtx3090"


def test_memory_alone_names_a_card() -> None:
    assert json.loads(run("plan", "A", "--vram", "32", "--json").output)["card"]["total_bytes"] > 30 << 30


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--gpu", "rtx309"), "did you mean rtx3090"),
        (("--gpu", "rtx3090", "--vram", "24"), "both name a card"),
        (("--vram", "0"), "--vram"),
        (("--model", "qwen3.8-27"), "qwen3.8-27b"),
        (("--context", "many"), "limits.context_tokens is 'many'"),
        (("--contxt", "1"), "--contxt"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], said: str) -> None:
    result = run("plan", "B", *arguments)

    assert result.exit_code in (2, 4)
    assert said in result.output


def test_profiles_are_listed() -> None:
    assert [line.split()[0] for line in run("profile", "list").output.splitlines()] == list(shipped())
    assert [row["name"] for row in json.loads(run("profile", "list", "--json").output)] == list(shipped())


def test_show_names_every_knob_and_its_source(tmp_path: Path) -> None:
    host = tmp_path / "host.toml"
    host.write_text("[server]\nport = 1234\n")
    result = run(
        "profile", "show", "B", "--effective", "--json", "--host-file", str(host), "--slots", "3",
        HYPERQWEN_CACHE_PREFIX="false", HYPERQWEN_API_KEY="sesame-open",
    )  # fmt: skip
    shown = json.loads(result.output)

    assert list(shown["knobs"]) == [knob.path for knob in knobs()]
    assert shown["knobs"]["server.port"] == {"value": 1234, "source": "host file", "where": str(host)}
    assert shown["knobs"]["limits.concurrent_requests"]["where"] == "--limits-concurrent-requests"
    assert shown["knobs"]["cache.prefix"] == {
        "value": False,
        "source": "environment",
        "where": "HYPERQWEN_CACHE_PREFIX",
    }
    assert shown["knobs"]["attention.backend"]["source"] == "profile"
    assert "sesame" not in result.output
    assert shown["api_key"] == "set (11 characters)"


def test_show_without_effective_leaves_out_defaults() -> None:
    output = run("profile", "show", "B").output

    assert "kv_cache_bytes" in output
    assert "keep_alive_seconds" not in output


def test_the_help_of_every_knob_names_its_variable() -> None:
    output = " ".join(run("plan", "--help", COLUMNS="200").output.split())

    for knob in knobs():
        assert knob.flag in output
        assert knob.variable in output


LOG = (
    "INFO [interface.py:990] Setting attention block size to 448 tokens to ensure that attention page size is >= mamba"
    " page size.\n"
    "INFO [kv_cache_utils.py:2474] GPU KV cache size: 68,605 tokens, Maximum concurrency for 65,536 tokens per request:"
    " 1.05x\n"
)


def test_what_was_measured_stands_beside_the_plan(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)

    rows = json.loads(run("plan", "B", "--measured", str(log), "--json").output)["measured"]

    assert {(row["what"], row["measured"], row["ratio"]) for row in rows} >= {
        ("KV cache pool", 68605, 1.0),
        ("Attention block", 448, 1.0),
    }
    assert "+0.0 %" in run("plan", "B", "--measured", str(log)).output


def test_a_log_without_figures_is_said_to_be_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("nothing\n")

    assert "says nothing of memory" in run("plan", "B", "--measured", str(log)).output
    assert run("plan", "B", "--measured", str(tmp_path / "none")).exit_code == 4
