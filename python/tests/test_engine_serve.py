from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hyperqwen.engine.serve import Status, architectures, inherited_fd


def test_an_inherited_descriptor() -> None:
    reader, writer = os.pipe()
    try:
        assert inherited_fd({"X": str(writer)}, "X") == writer
        assert inherited_fd({}, "X") is None
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("text", ["", "seven", "-1", "99999"])
def test_a_descriptor_that_is_none_names_the_variable(text: str) -> None:
    with pytest.raises(ValueError, match=f"HYPERQWEN_LISTEN_FD is '{text}', must be the number"):
        inherited_fd({"HYPERQWEN_LISTEN_FD": text}, "HYPERQWEN_LISTEN_FD")


def test_stages_are_told_until_nobody_listens() -> None:
    reader, writer = os.pipe()
    status = Status(writer)
    status.begin("import")
    status.begin("load")
    assert os.read(reader, 100) == b"import\nload\n"
    os.close(reader)
    status.begin("serve")
    status.begin("serve")
    os.close(writer)


def test_nobody_listens_from_the_start() -> None:
    status = Status(None)
    status.begin("import")
    status.close()


def test_a_closed_status_lets_the_launcher_see_the_end() -> None:
    reader, writer = os.pipe()
    status = Status(writer)
    status.close()
    status.close()
    assert os.read(reader, 1) == b"", "the pipe is still open for writing"
    os.close(reader)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"architectures": ["A", "B"]}, ["A", "B"]),
        ({}, []),
        ({"architectures": None}, []),
        ({"architectures": [1]}, []),
    ],
)
def test_architectures(tmp_path: Path, config: dict[str, object], expected: list[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert architectures(tmp_path) == expected


def test_architectures_of_a_model_elsewhere(tmp_path: Path) -> None:
    assert architectures(tmp_path / "Qwen/Qwen3.8-27B") == []
