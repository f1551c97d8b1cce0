from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from hyperqwen.errors import BadInputError
from hyperqwen.files import read_regular, read_regular_text


def test_a_file_is_read_whole_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes("12 ä\n".encode())

    assert read_regular(file, 6) == "12 ä\n".encode()
    assert read_regular_text(file, 6) == "12 ä\n"
    with pytest.raises(BadInputError, match=r"file is larger than 5 bytes"):
        read_regular(file, 5)


def test_a_pipe_without_a_writer_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(BadInputError, match="pipe is no file"):
        read_regular(pipe, 10)


@pytest.mark.parametrize("path", ["/dev/zero", "/"])
def test_a_device_and_a_folder_are_refused(path: str) -> None:
    with pytest.raises(BadInputError, match="is no file"):
        read_regular(Path(path), 10)


def test_what_cannot_be_opened_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "absent", 10)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(OSError, match="No such device or address"):
            read_regular(tmp_path / "s", 10)
