from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyperqwen import share
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


def test_the_first_lines_say_whether_it_fits() -> None:
    assert "MiB: fits, with requests of up to 69,440 tokens" in run("plan", "B").output
    assert "MiB: refused, see below" in run("plan", "B", "--context", "200000").output
    assert "set (profile B)" in run("plan", "B").output
    assert "-" not in run("plan", "D", "--vram", "14").output.split("KV cache pool")[1].split("\n")[0]


def test_a_refused_plan_is_shown_and_ends_with_2() -> None:
    result = run("plan", "B", "--context", "200000")

    assert result.exit_code == 2
    assert "refused: limits.context_tokens is 200000" in result.output
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


def test_a_smaller_model_needs_another_drafter(tmp_path: Path) -> None:
    text = (share.folder("models") / "qwen3.8-27b.toml").read_text()
    smaller = tmp_path / "smaller.toml"
    smaller.write_text(text.replace("\nhidden_size = 5120", "\nhidden_size = 2560"))
    refused = run("plan", "B", "--model", str(smaller), COLUMNS="400")

    assert refused.exit_code == 2
    assert "refused: speculation.method is dflash2" in refused.output
    assert "its hidden_size is 5120, and the model's 2560; use --speculation-method mtp" in refused.output
    mended = run("plan", "B", "--model", str(smaller), "--speculation-method", "mtp", "--speculation-tokens", "3")
    assert mended.exit_code == 0, mended.output


TOTAL = (
    "INFO [gpu_worker.py:650] Free memory on device (138.9/139.72 GiB) on startup. Desired GPU memory utilization is "
    "(0.9, 125.75 GiB). Actual usage is 15.1 GiB for consumed memory (weights + non-torch), 0.5 GiB for peak "
    "activation, and 0.3 GiB for CUDAGraph memory.\n"
)


def test_the_card_of_the_log_is_planned_for(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(TOTAL + LOG)
    total = round(139.72 * (1 << 30))

    of_log = json.loads(run("plan", "B", "--measured", str(log), "--json").output)
    assert (of_log["card"]["title"], of_log["card"]["total_bytes"]) == ("the card of the log", total)
    assert {"what": "Memory in all", "unit": "bytes", "predicted": total, "measured": total, "ratio": 1.0} in of_log[
        "measured"
    ]
    named = json.loads(run("plan", "B", "--measured", str(log), "--gpu", "rtx3090", "--json").output)
    assert named["card"]["name"] == "rtx3090"


def test_a_log_of_another_context_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    result = run("plan", "B", "--context", "4096", "--measured", str(log))

    assert result.exit_code == 2
    assert "limits.context_tokens 65536, and 4096 are planned" in " ".join(result.output.split())
    assert "--context 65536" in result.output


def test_a_log_without_figures_is_said_to_be_one(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("nothing\n")

    assert "says nothing of memory" in run("plan", "B", "--measured", str(log)).output
    assert run("plan", "B", "--measured", str(tmp_path / "none")).exit_code == 4
