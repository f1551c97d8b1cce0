from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import BadInputError, MissingError, UnsuitableError
from hyperqwen.runtime import site


def write(folder: Path, **changes: Any) -> Path:
    (folder / "python3").touch()
    file = folder / "site.json"
    values = {"engine": "cuda", "engine_python": str(folder / "python3"), "engine_id": "abc-engine-cuda"}
    file.write_text(json.dumps({**values, **changes}))
    return file


def test_what_a_wrapper_says(tmp_path: Path) -> None:
    found = site.read(write(tmp_path, cc=str(tmp_path / "cc/bin")), "serve")
    assert (found.engine, found.engine_python) == ("cuda", tmp_path / "python3")
    assert found.programs == [tmp_path, tmp_path / "cc/bin"]
    assert site.read(write(tmp_path), "serve").programs == [tmp_path]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "tpu"}, "engine is 'tpu'"),
        ({"modle": "x"}, "modle is not a field; did you mean 'model'?"),
        ({"engine_id": "../up"}, "engine_id is '../up'"),
        ({"python_path": "/x"}, "python_path is '/x'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError) as raised:
        site.read(write(tmp_path, **changes), "serve")
    assert said in str(raised.value)


@pytest.mark.parametrize("field", ["engine_python", "model", "ptxas", "cuda_home"])
def test_a_part_that_was_collected_says_how_to_get_it_back(tmp_path: Path, field: str) -> None:
    with pytest.raises(UnsuitableError, match=rf"{field} of .* is gone: /nowhere/x") as raised:
        site.read(write(tmp_path, **{field: "/nowhere/x"}), "single")
    assert "./hq run .#single" in str(raised.value)


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="does not exist"):
        site.read(tmp_path / "none.json", "serve")
    (tmp_path / "site.json").write_text("{")
    with pytest.raises(BadInputError, match="is not JSON"):
        site.read(tmp_path / "site.json", "serve")
