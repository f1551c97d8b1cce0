from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyperqwen.cli import main

CONFIG = Path(__file__).parents[2] / "prepare" / "nano.toml"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["nano", *map(str, arguments)])


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "nano"
    result = run("build", "--config", CONFIG, "--out", out)
    assert result.exit_code == 0, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"{out}: ")
    return out


def test_build_refuses_what_exists(built: Path) -> None:
    result = run("build", "--config", CONFIG, "--out", built)

    assert result.exit_code == 2
    assert f"hyperqwen: {built} exists already" in result.stderr


def test_cycles(built: Path) -> None:
    assert "[months, 12 tokens]\nJanuary February March" in run("cycles", built).stdout
    rings = json.loads(run("cycles", built, "--json").stdout)
    assert {"name", "ids", "text"} == rings[0].keys()


def test_expect(built: Path) -> None:
    assert run("expect", built, "from Monday", "-n", "3").stdout == " Tuesday Wednesday Thursday\n"
    answer = json.loads(run("expect", built, "<think>\n\n</think>\n\n", "-n", "200", "--json").stdout)
    assert answer["answer"].startswith("Hello")
    assert answer["answer"].endswith("<|im_end|>")
    assert len(answer["answer_ids"]) < 200
    longer = json.loads(run("expect", built, "\n\n", "-n", "200", "--json", "--ignore-eos").stdout)
    assert len(longer["answer_ids"]) == 200


def test_expect_needs_a_prompt(built: Path) -> None:
    result = run("expect", built, "")

    assert result.exit_code == 2
    assert "the prompt is empty" in result.stderr


def test_audit(built: Path) -> None:
    assert "successors  right in " in run("audit", built).stdout
    found = json.loads(run("audit", built, "--json").stdout)
    assert found["margin"] > 4
    assert len(found["accepted"]) == 3


def test_a_folder_that_is_no_nano_exits_with_not_found(tmp_path: Path) -> None:
    result = run("audit", tmp_path)

    assert result.exit_code == 4
    assert "nano.json does not exist" in result.stderr
