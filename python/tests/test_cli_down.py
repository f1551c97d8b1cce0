from __future__ import annotations

import errno
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hyperqwen.cli import main
from hyperqwen.runtime import records
from tests.running import launcher


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    return tmp_path / "log"


def down(logs: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["down", "--cache-dir", str(logs.parent), *arguments])


def test_the_one_that_runs_is_stopped(logs: Path) -> None:
    with launcher(logs) as (process, record):
        done = down(logs)
        assert process.wait(5) == 0
    assert (done.exit_code, done.stdout.count("\n")) == (0, 1)
    assert f"profile B on port 18020 (process {record.pid}) stopped after" in done.stdout
    assert "told profile B on port 18020" in done.stderr


def test_the_end_is_waited_for(logs: Path) -> None:
    with launcher(logs, drain=1.0) as (process, _):
        began = time.monotonic()
        done = down(logs, "--port", "18020", "--json")
        assert time.monotonic() - began >= 1.0 and process.wait(1) == 0
    (said,) = json.loads(done.stdout)
    assert (said["port"], said["how"]) == (18020, "stopped") and said["seconds"] >= 1.0


def test_now_does_not_wait_for_requests(logs: Path) -> None:
    with launcher(logs, drain=60.0) as (process, _):
        began = time.monotonic()
        done = down(logs, "--now")
        assert done.exit_code == 0 and process.wait(1) == 0
    assert time.monotonic() - began < 10


def test_one_that_is_stopping_is_not_told_again(logs: Path) -> None:
    with launcher(logs, drain=60.0, stopping=True) as (process, _):
        process.send_signal(signal.SIGTERM)
        done = down(logs, "--timeout", "1")
        assert done.exit_code == 1 and "is stopping already" in done.stderr
        assert process.poll() is None, "its requests were cut off"
        assert down(logs, "--now").exit_code == 0 and process.wait(1) == 0


def test_one_that_takes_too_long_is_left_to_finish(logs: Path) -> None:
    with launcher(logs, drain=60.0) as (process, record):
        done = down(logs, "--timeout", "1")
        assert process.poll() is None
    assert done.exit_code == 1
    assert f"not ended after 1 s: port 18020 (process {record.pid})" in done.stderr and "--now" in done.stderr


def test_of_several_one_has_to_be_named(logs: Path) -> None:
    with launcher(logs) as (first, _), launcher(logs, port=18021, profile="A") as (second, _):
        done = down(logs)
        assert (done.exit_code, first.poll(), second.poll()) == (2, None, None)
        assert "2 servers run" in done.stderr and "--port 18021: profile A" in done.stderr

        assert down(logs, "--profile", "a").exit_code == 0
        assert second.wait(5) == 0 and first.poll() is None


def test_all(logs: Path) -> None:
    with launcher(logs) as (first, _), launcher(logs, port=18021) as (second, _):
        done = down(logs, "--all", "--json")
        assert first.wait(5) == second.wait(5) == 0
    assert sorted(entry["port"] for entry in json.loads(done.stdout)) == [18020, 18021]


def test_none_runs(logs: Path) -> None:
    for arguments in ((), ("--all",)):
        done = down(logs, *arguments)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", "hyperqwen: none runs\n")
    assert json.loads(down(logs, "--json").stdout) == []


def test_one_that_is_named_and_does_not_run(logs: Path) -> None:
    done = down(logs, "--port", "18033")
    assert done.exit_code == 4 and "no server of port 18033 runs" in done.stderr and "none runs" in done.stderr
    with launcher(logs) as (process, _):
        done = down(logs, "--profile", "E", "--port", "18020")
        assert done.exit_code == 4 and "profile E and port 18020" in done.stderr
        assert "profile B on --port 18020" in done.stderr and process.poll() is None


def test_a_number_that_is_another_process_by_now_is_let_be(logs: Path) -> None:
    with launcher(logs) as (process, record):
        records.write(logs, record.model_copy(update={"started": record.started - 60}))
        done = down(logs)
        assert (done.exit_code, done.stderr) == (0, "hyperqwen: none runs\n")
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


def test_one_that_ended_since_it_was_looked_up(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher(logs) as (process, record):
        looked = records.found

        def late(folder: Path, *, tidy: bool = True) -> list[records.Record]:
            found = looked(folder, tidy=tidy)
            process.kill()
            process.wait()
            return found

        monkeypatch.setattr(records, "found", late)
        done = down(logs)
    assert done.exit_code == 0 and f"(process {record.pid}) had ended by itself" in done.stdout


def test_a_number_that_became_anothers_since_it_was_looked_up(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with launcher(logs) as (process, record):
        before = record.model_copy(update={"started": record.started - 60})
        monkeypatch.setattr(records, "found", lambda folder: [before])
        done = down(logs)
        assert done.exit_code == 0 and "had ended by itself" in done.stdout
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)


def test_all_and_a_name_exclude_each_other(logs: Path) -> None:
    done = down(logs, "--all", "--port", "18020")
    assert done.exit_code == 2 and "exclude each other" in done.stderr


@pytest.mark.parametrize("arguments", [("--port", "0"), ("--port", "x"), ("--timeout", "0"), ("--timeout", "inf")])
def test_wrong_arguments(logs: Path, arguments: tuple[str, ...]) -> None:
    done = down(logs, *arguments)
    assert done.exit_code == 2 and arguments[1] in done.stderr


def test_no_place_for_records() -> None:
    done = CliRunner().invoke(main, ["down"], env={"HOME": None, "XDG_STATE_HOME": None, "HYPERQWEN_CACHE_DIR": None})
    assert done.exit_code == 3 and "--cache-dir" in done.stderr


def test_a_process_of_another_user(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(handle: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    with launcher(logs) as (process, _):
        # Not every place where this runs has a second user, and none may signal what is not its own.
        monkeypatch.setattr(signal, "pidfd_send_signal", refused)
        done = down(logs)
        assert process.poll() is None
    assert done.exit_code == 3 and "is another user's" in done.stderr


def test_interrupted_it_leaves_the_server_to_finish(logs: Path) -> None:
    with launcher(logs, drain=60.0) as (process, _):
        program = "from hyperqwen.cli import main; main(prog_name='hyperqwen')"
        command = [sys.executable, "-c", program, "down", "--cache-dir", str(logs.parent)]
        waiting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert waiting.stderr is not None and "told profile B" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert "Traceback" not in waiting.communicate(timeout=10)[1]
        assert waiting.returncode == 130 and process.poll() is None
