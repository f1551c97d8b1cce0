from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.cli import logs as module
from hyperqwen.cli import main
from hyperqwen.cli.logs import Tail
from tests.running import launcher


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "log"
    made.mkdir()
    return made


def logs(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["logs", "--cache-dir", str(folder.parent), *arguments])


def test_the_log_of_the_one_that_runs(folder: Path) -> None:
    log = folder / "serve-18020.log"
    log.write_text("".join(f"line {number}\n" for number in range(300)))
    (folder / "demo-18020.log").write_text("newer, but of none that runs\n")
    with launcher(folder, log=log):
        done = logs(folder)
        assert done.exit_code == 0 and done.stdout == "".join(f"line {number}\n" for number in range(200, 300))
        assert done.stderr == f"hyperqwen: {log}\n"
        assert logs(folder, "--lines", "2", "--profile", "b").stdout == "line 298\nline 299\n"
        assert logs(folder, "--lines", "0", "--port", "18020").stdout == ""


def test_else_the_newest_log_or_that_of_the_port(folder: Path) -> None:
    for name, age in (("serve-18020.log", 50), ("demo-18021.log", 20), ("serve-18020.log.1", 1), ("other.log", 0)):
        (folder / name).write_text(f"{name}\n")
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    assert logs(folder).stdout == "demo-18021.log\n"
    assert logs(folder, "--port", "18020").stdout == "serve-18020.log\n"


def test_of_several_one_has_to_be_named(folder: Path) -> None:
    (folder / "a.log").write_text("of A\n")
    with launcher(folder, log=folder / "b.log"), launcher(folder, log=folder / "a.log", port=18021, profile="A"):
        done = logs(folder)
        assert done.exit_code == 2 and done.stdout == ""
        assert "--port 18020: profile B" in done.stderr and "--port 18021: profile A" in done.stderr
        assert logs(folder, "--profile", "A").stdout == "of A\n"


def test_none(folder: Path) -> None:
    done = logs(folder)
    assert done.exit_code == 4 and str(folder) in done.stderr and "journalctl" in done.stderr
    assert "of a server on port 18044" in logs(folder, "--port", "18044").stderr
    (folder / "serve-18020.log").write_text("x\n")
    done = logs(folder, "--profile", "B")
    assert done.exit_code == 4 and "no server of profile B runs" in done.stderr


def test_a_server_that_speaks_on_stderr_has_no_log(folder: Path) -> None:
    with launcher(folder) as (process, _):
        done = logs(folder)
        assert done.exit_code == 4 and "--verbose" in done.stderr and str(process.pid) in done.stderr
        assert "journalctl -u hyperqwen-B" in done.stderr and "docker logs" in done.stderr


def test_a_log_that_is_gone(folder: Path) -> None:
    with launcher(folder, log=folder / "none.log"):
        done = logs(folder)
    assert done.exit_code == 4 and "none.log is gone" in done.stderr


def test_what_is_no_text_comes_as_it_is(folder: Path) -> None:
    (folder / "serve-18020.log").write_bytes(b"\xff\x00\r 50%\rdone\n")
    assert logs(folder).stdout_bytes == b"\xff\x00\r 50%\rdone\n"


@given(st.lists(st.sampled_from([b"", b"a", b"long" * 9])), st.booleans(), st.integers(0, 9), st.integers(1, 7))
def test_the_last_lines_whatever_the_pieces(lines: list[bytes], whole: bool, many: int, chunk: int) -> None:
    data = b"\n".join(lines) + (b"\n" if whole and lines else b"")
    expected = data.splitlines(keepends=True)
    expected = expected[len(expected) - min(many, len(expected)) :]
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"hyperqwen-tail-{os.getpid()}"
    before = module._CHUNK
    try:
        path.write_bytes(data)
        module._CHUNK = chunk
        with Tail(path) as tail:
            assert b"".join(tail.last(many)) == b"".join(expected)
            with path.open("ab") as file:
                file.write(b"new\n")
            assert b"".join(tail.news(lambda: None)) == b"new\n"
    finally:
        module._CHUNK = before
        path.unlink(missing_ok=True)


def test_news_through_a_rename_a_cut_and_a_gap(folder: Path) -> None:
    log, told = folder / "serve-1.log", []
    log.write_text("one\n")

    def news(tail: Tail) -> bytes:
        return b"".join(tail.news(lambda: told.append(1)))

    with Tail(log) as tail:
        assert b"".join(tail.last(9)) == b"one\n"
        assert news(tail) == b"" and not told

        log.rename(folder / "serve-1.log.1")
        with (folder / "serve-1.log.1").open("a") as old:
            old.write("last words\n")
        assert news(tail) == b"last words\n" and not told, "the new file is not there yet"
        log.write_text("two\n")
        assert news(tail) == b"two\n" and len(told) == 1

        log.write_text("3\n")
        assert news(tail) == b"3\n" and len(told) == 2


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def test_follow_prints_what_comes_until_it_is_interrupted(folder: Path, tmp_path: Path) -> None:
    log, out = folder / "serve-18020.log", tmp_path / "out"
    log.write_text("one\ntwo\n")
    program = "from hyperqwen.cli import main; main(prog_name='hyperqwen')"
    command = [sys.executable, "-c", program, "logs", "-f", "-n", "1", "--cache-dir", str(folder.parent)]
    with out.open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: out.read_bytes() == b"two\n", "last line")
        with log.open("a") as file:
            file.write("three\n")
        wait_for(lambda: out.read_bytes() == b"two\nthree\n", "new line")
        # As a start of the next server does it.
        log.replace(folder / "serve-18020.log.1")
        log.write_text("anew\n")
        wait_for(lambda: out.read_bytes() == b"two\nthree\nanew\n", "new file")
        process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=10)[1]
    finally:
        process.kill()
    assert process.returncode == 130
    assert "begins anew" in errors and "Traceback" not in errors


@pytest.mark.parametrize("arguments", [("--lines", "-1"), ("--lines", "all"), ("--port", "70000")])
def test_wrong_arguments(folder: Path, arguments: tuple[str, ...]) -> None:
    done = logs(folder, *arguments)
    assert done.exit_code == 2 and arguments[1] in done.stderr
