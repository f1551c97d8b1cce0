from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hyperqwen.engine.serve import Status, architectures, inherited_fd, launcher
from tests import fake_engine
from tests.test_cli_demo import wait_for


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


def test_the_launchers_number() -> None:
    assert launcher({"HYPERQWEN_LAUNCHER_PID": "17"}) == 17 and launcher({}) is None


@pytest.mark.parametrize("text", ["", "0", "-1", "me"])
def test_what_is_no_number_of_a_launcher(text: str) -> None:
    with pytest.raises(ValueError, match=f"HYPERQWEN_LAUNCHER_PID is '{text}', must be the number of a process"):
        launcher({"HYPERQWEN_LAUNCHER_PID": text})


_CHILD = """
import os, signal, sys, time
from hyperqwen.engine.serve import die_with_parent
die_with_parent(signal.SIGTERM, int(sys.argv[1]) or os.getppid())
open(sys.argv[2], "w").close()
time.sleep(60)
"""


def test_an_engine_whose_launcher_ended_before_it_began_ends_at_once(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    program = [sys.executable, "-c", _CHILD]
    orphan = subprocess.run([*program, str(ended.pid), str(tmp_path / "orphan")], timeout=30)
    assert orphan.returncode == -signal.SIGTERM and not (tmp_path / "orphan").exists()

    child = subprocess.Popen([*program, str(os.getpid()), str(tmp_path / "child")])
    try:
        wait_for(lambda: (tmp_path / "child").exists(), "child")
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_an_engine_ends_with_its_launcher(tmp_path: Path) -> None:
    between = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', *sys.argv[2:]])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "child.wait()\n"
    )
    place = tmp_path / "pid"
    parent = subprocess.Popen([sys.executable, "-c", between, str(place), _CHILD, "0", str(tmp_path / "child")])
    try:
        wait_for(lambda: (tmp_path / "child").exists(), "child")
    finally:
        parent.kill()
        parent.wait()
    child = int(place.read_text())
    wait_for(lambda: not fake_engine.alive(child), "end of the child")
