from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyperqwen.cli import main
from hyperqwen.runtime.keys import resolve_key


def run(*arguments: str, **environ: str | None) -> Result:
    return CliRunner().invoke(main, ["keygen", *arguments], env=environ, prog_name="hyperqwen")


def test_the_key_is_written_for_its_owner_and_not_shown(tmp_path: Path) -> None:
    file = tmp_path / "new" / "key"

    result = run(str(file))

    key = resolve_key(file, {})
    assert key is not None
    assert len(key) >= 43
    assert result.output == f"{file}\n"
    assert key not in result.output
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["key"]


def test_an_open_umask_does_not_open_the_key(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run(str(tmp_path / "key"))
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600


def test_a_key_that_exists_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("mine\n")

    result = run(str(file))

    assert result.exit_code == 2
    assert "--replace" in result.output
    assert file.read_text() == "mine\n"
    assert os.listdir(tmp_path) == ["key"]


def test_a_key_is_replaced_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "key"
    keys = set()
    for _ in range(3):
        assert run(str(file), "--replace").exit_code == 0
        keys.add(file.read_text())

    assert len(keys) == 3


def test_where_it_goes_by_itself(tmp_path: Path) -> None:
    assert run(XDG_CONFIG_HOME=str(tmp_path)).output == f"{tmp_path}/hyperqwen/api-key\n"
    assert run(XDG_CONFIG_HOME=None, HOME=str(tmp_path)).output == f"{tmp_path}/.config/hyperqwen/api-key\n"
    assert run(XDG_CONFIG_HOME=None, HOME=None).exit_code == 3


@pytest.mark.parametrize("place", ["/proc/nothing/key", "/dev/null/key"])
def test_a_place_that_cannot_be_written(place: str) -> None:
    result = run(place)

    assert result.exit_code == 3
    assert "name a file that you may write" in result.output


def test_a_folder_and_an_empty_name_are_no_file(tmp_path: Path) -> None:
    folder = run(str(tmp_path))
    assert folder.exit_code == 2 and f"{tmp_path} is a folder" in folder.stderr
    assert f"keygen {tmp_path}/api-key" in folder.stderr
    empty = run("")
    assert empty.exit_code == 2 and "name of the key file is empty" in empty.stderr
    assert list(tmp_path.iterdir()) == []
