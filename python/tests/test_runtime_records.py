from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperqwen.errors import UnsuitableError
from hyperqwen.runtime import records
from hyperqwen.runtime.records import Record


def record(**changes: object) -> Record:
    values: dict[str, object] = {
        "command": "serve",
        "profile": "B",
        "model": "qwen3.8-27b",
        "host": "127.0.0.1",
        "port": 18020,
        "url": "http://127.0.0.1:18020/v1",
        "pid": os.getpid(),
        "started": records.own_start(),
    }
    return Record.model_validate(values | changes)


def test_a_run_is_found_while_it_lasts(tmp_path: Path) -> None:
    mine = record(log=tmp_path / "serve-18020.log", engine_pid=7)
    with records.kept(tmp_path, mine):
        assert records.found(tmp_path) == [mine]
        assert records.folder(tmp_path).stat().st_mode & 0o077 == 0
        records.write(tmp_path, record(ready=True))
        assert [run.ready for run in records.found(tmp_path)] == [True], "a second record beside the first"
    assert records.found(tmp_path) == []
    assert list(records.folder(tmp_path).iterdir()) == []


def test_runs_are_in_the_order_of_their_ports(tmp_path: Path) -> None:
    for port in (18021, 8000, 18020):
        records.write(tmp_path, record(port=port))
    assert [run.port for run in records.found(tmp_path)] == [8000, 18020, 18021]


def test_one_that_was_killed_is_forgotten(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    import psutil

    path = records.write(tmp_path, record(pid=process.pid, started=psutil.Process(process.pid).create_time()))
    assert [run.pid for run in records.found(tmp_path)] == [process.pid]
    process.kill()
    # Even before its parent has looked at how it ended.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert records.found(tmp_path) == []
    assert not path.exists()
    process.wait()
    process.stdin.close()  # type: ignore[union-attr]


def test_a_number_that_another_process_has_now_is_not_the_run(tmp_path: Path) -> None:
    records.write(tmp_path, record(started=records.own_start() - 60))
    assert records.found(tmp_path) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": 18020}', "[" * 50_000, '{"pid": ' + "1" * 5000 + "}"])
def test_a_file_that_is_no_record_is_left_alone(tmp_path: Path, text: str) -> None:
    mine = record()
    records.write(tmp_path, mine)
    other = records.folder(tmp_path) / "notes.json"
    other.write_text(text)
    assert records.found(tmp_path) == [mine]
    assert other.exists()


def test_nothing_was_ever_started(tmp_path: Path) -> None:
    assert records.found(tmp_path / "none") == []


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsuitableError, match=r"record of this run cannot be written: .*: Not a directory"):
        records.write(tmp_path / "file", record())


def test_a_pipe_among_the_records_is_not_waited_for(tmp_path: Path) -> None:
    mine = record()
    records.write(tmp_path, mine)
    os.mkfifo(records.folder(tmp_path) / "1-1.json")
    assert records.found(tmp_path) == [mine]
