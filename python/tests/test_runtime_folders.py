from __future__ import annotations

from pathlib import Path

import pytest

from hyperqwen.errors import BadInputError, UnsuitableError
from hyperqwen.runtime import folders


@pytest.fixture
def blocked(tmp_path: Path) -> Path:
    """A path below a plain file: not to be made, even by root."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "below"


def test_the_usual_places(tmp_path: Path) -> None:
    made = folders.prepare({"HOME": str(tmp_path)}, "id-1")

    assert made.cache == tmp_path / ".cache/hyperqwen/id-1"
    assert made.logs == tmp_path / ".local/state/hyperqwen"
    assert made.note is None
    assert made.cache.stat().st_mode & 0o077 == 0, "others may read the caches"


def test_xdg_variables_come_first_and_relative_ones_do_not_count(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path / "home"), "XDG_CACHE_HOME": str(tmp_path / "c"), "XDG_STATE_HOME": "relative"}

    made = folders.prepare(environ, "id")

    assert made.cache == tmp_path / "c/hyperqwen/id"
    assert made.logs == tmp_path / "home/.local/state/hyperqwen"


def test_discard_keeps_the_usual_places(tmp_path: Path) -> None:
    made = folders.prepare({"HOME": str(tmp_path)}, "id")
    made.discard()
    assert made.cache.is_dir()


@pytest.mark.parametrize("home", [None, "blocked"])
def test_without_a_writable_place_a_temporary_one_is_used(
    home: str | None, blocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    made = folders.prepare({"HOME": str(blocked)} if home else {}, "id")

    assert made.note is not None and str(made.cache.parent) in made.note
    assert made.cache.is_dir() and made.logs.is_dir()
    made.discard()
    assert not made.cache.exists() and not made.logs.exists()


def test_a_folder_that_was_asked_for_is_never_replaced(blocked: Path) -> None:
    with pytest.raises(UnsuitableError, match=r"below cannot be used: Not a directory"):
        folders.prepare({"HOME": "/"}, "id", blocked)


def test_no_place_at_all(blocked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(blocked))

    with pytest.raises(UnsuitableError) as raised:
        folders.prepare({"HOME": str(blocked)}, "id")

    assert "neither a cache" in str(raised.value) and "TMPDIR" in str(raised.value)


def test_what_is_relative_is_meant_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    made = folders.prepare({}, "id", Path("c"))

    assert (made.cache, made.logs) == (tmp_path / "c/id", tmp_path / "c/log")
    assert folders.cache_folder({}, "id", Path("c")) == made.cache
    assert folders.logs_folder({}, Path("c")) == made.logs


def test_an_empty_name_is_no_folder() -> None:
    with pytest.raises(BadInputError, match=r"cache folder's name is empty"):
        folders.prepare({}, "id", Path(""))
