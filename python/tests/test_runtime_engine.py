from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import UnsuitableError
from hyperqwen.runtime import ports
from hyperqwen.runtime.engine import Engine, EngineError
from tests import fake_engine


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    engines: list[Engine] = []

    def begin(**behaviour: Any) -> Engine:
        engine = Engine.start(
            fake_engine.write(tmp_path, **behaviour),
            ["--model", "m"],
            {"ONLY": "this"},
            listener=ports.claim("127.0.0.1", 0),
            folder=tmp_path,
            log=tmp_path / "log",
        )
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.stop(0.1)


def stages_until(engine: Engine, last: str, seconds: float = 20) -> list[str]:
    found: list[str] = []
    deadline = time.monotonic() + seconds
    while last not in found:
        assert time.monotonic() < deadline, f"only {found}"
        found += engine.stages(0.05)
    return found


def test_it_is_started_apart_and_tells_its_stages(start: Any, tmp_path: Path) -> None:
    engine = start()

    assert stages_until(engine, "serve") == ["import", "configure", "load", "serve"]
    seen = fake_engine.seen(tmp_path)
    assert seen["argv"][1:] == ["-P", "-s", "-m", "hyperqwen.engine.serve", "--model", "m"]
    assert seen["cwd"] == str(tmp_path)
    own = {"ONLY", "HYPERQWEN_LISTEN_FD", "HYPERQWEN_STATUS_FD", "HYPERQWEN_LAUNCHER_PID", "LC_CTYPE"}
    assert set(seen["environ"]) <= own, "the caller's environment leaked"
    assert os.getpgid(engine.pid) == engine.pid, "a ctrl-C of the terminal would reach it"
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    engine.check()


def test_stop_ends_the_whole_group(start: Any, tmp_path: Path) -> None:
    engine = start(child=True)
    stages_until(engine, "serve")
    child = int((tmp_path / "child.pid").read_text())
    assert fake_engine.alive(child)

    engine.stop()

    assert engine.returncode == 0, "SIGTERM was not given a chance"
    deadline = time.monotonic() + 5
    while fake_engine.alive(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not fake_engine.alive(child), "a process of the engine is left behind"
    engine.stop()


def test_an_engine_that_ignores_sigterm_is_killed(start: Any) -> None:
    engine = start(deaf=True)
    stages_until(engine, "serve")

    began = time.monotonic()
    engine.stop(grace=0.3)

    assert engine.returncode == -9
    assert time.monotonic() - began < 5


def last_words(engine: Engine) -> str:
    """What the user is told of an engine that ends while it loads."""
    stages_until(engine, "load")
    deadline = time.monotonic() + 10
    while engine.returncode is None and time.monotonic() < deadline:
        engine.stages(0.05)
    with pytest.raises(EngineError) as raised:
        engine.check()
    return str(raised.value)


def test_an_engine_that_dies_says_why(start: Any, tmp_path: Path) -> None:
    engine = start(die_in="load")
    message = last_words(engine)
    assert "ended by itself (exit status 7)" in message
    assert "ValueError: no such tensor" in message, "the cause is above the last lines and must be shown all the same"
    assert "line 29" in message and "line 5" not in message
    assert str(tmp_path / "log") in message


def test_an_engine_that_is_killed_says_what_kills(start: Any, tmp_path: Path) -> None:
    engine = start(killed_in="load")
    message = last_words(engine)
    assert "ended by itself (killed by SIGKILL)" in message
    assert "| engine: starting" in message, "the last lines of the log are what there is to go by"
    assert "memory runs out" in message and str(tmp_path / "log") in message


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with ports.claim("127.0.0.1", 0) as listener, pytest.raises(UnsuitableError, match="cannot be started"):
        Engine.start(tmp_path / "none", [], {}, listener=listener, folder=tmp_path, log=None)


def test_an_engine_that_cannot_be_followed_is_not_left_running(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_arguments: Any) -> None:
        while not (tmp_path / "seen.json").exists():
            time.sleep(0.02)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(os, "set_blocking", full)
    with pytest.raises(RuntimeError, match="new thread"):
        start()
    assert not fake_engine.alive(fake_engine.seen(tmp_path)["pid"])


@contextmanager
def stderr_to(descriptor: int) -> Iterator[None]:
    """Let this process's stderr be `descriptor` meanwhile."""
    before = os.dup(2)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def test_an_engine_does_not_wait_for_who_reads_its_words(tmp_path: Path) -> None:
    """A stderr that nobody reads from: the engine loads all the same, what it says is known, and the end comes out."""
    words = [f"{number} {'x' * 100}" for number in range(60_000)]
    reader, writer = os.pipe()
    with stderr_to(writer):
        engine = Engine.start(
            fake_engine.write(tmp_path, says=words),
            [],
            {},
            listener=ports.claim("127.0.0.1", 0),
            folder=tmp_path,
            log=None,
        )
        try:
            news = ""
            stages: list[str] = []
            deadline = time.monotonic() + 20
            while "serve" not in stages or words[-1] not in news:
                assert time.monotonic() < deadline, f"the engine waits in {stages}"
                stages += engine.stages(0.05)
                said = engine.news()
                assert said == "" or said.endswith("\n"), "a line that was not whole"
                news += said
            os.close(writer)
            with open(reader, "rb") as file:
                heard = threading.Thread(target=lambda: shown.append(file.read()))
                shown: list[bytes] = []
                heard.start()
                engine.stop(5)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                heard.join(10)
        finally:
            engine.stop(0.1)
    (text,) = shown
    assert text.startswith(b"engine: starting\n0 xxx") and text.endswith(b"engine: finishing\n")
    assert b"\n[hyperqwen: words of the engine are left out here]\n" in text
    assert len(text) < 5 << 20


@pytest.mark.parametrize("closed", [True, False])
def test_an_engine_lives_on_when_nobody_hears_it(tmp_path: Path, closed: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with stderr_to(writer):
        os.close(writer)
        if closed:
            os.close(2)
        engine = Engine.start(
            fake_engine.write(tmp_path, says=["x" * 1000] * 300),
            [],
            {},
            listener=ports.claim("127.0.0.1", 0),
            folder=tmp_path,
            log=None,
        )
        try:
            assert stages_until(engine, "serve")[-1] == "serve"
            engine.check()
        finally:
            engine.stop(0.1)


def test_a_long_line_of_the_log_is_cut(start: Any, tmp_path: Path) -> None:
    engine = start()
    stages_until(engine, "serve")
    (tmp_path / "log").write_text("x" * 5000 + "\n")

    assert max(len(line) for line in str(engine.failure("trouble")).splitlines()) < 260


def test_an_engine_that_hangs_says_where_and_who_cannot_say_lives_on(start: Any, tmp_path: Path) -> None:
    engine = start(child=True)
    stages_until(engine, "serve")
    child = int((tmp_path / "child.pid").read_text())
    assert engine.dump() == [], "neither expects the signal, which would end it"
    assert fake_engine.alive(engine.pid) and fake_engine.alive(child)

    (tmp_path / "other").mkdir()
    program = tmp_path / "other/python3"
    program.write_text(
        f"#!{sys.executable}\nimport faulthandler, signal, time\n"
        "def hangs():\n    print('hanging', flush=True)\n    time.sleep(60)\n"
        "faulthandler.register(signal.SIGUSR1)\nhangs()\n"
    )
    program.chmod(0o755)
    log = tmp_path / "other/log"
    with ports.claim("127.0.0.1", 0) as listener:
        hung = Engine.start(program, [], {}, listener=listener, folder=tmp_path, log=log)
    try:
        deadline = time.monotonic() + 10
        while "hanging" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert hung.dump() == [hung.pid]
        while "in hangs" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert "in hangs" in log.read_text() and hung.returncode is None
    finally:
        hung.stop(0.1)
