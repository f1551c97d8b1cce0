"""Small files of the user's, read whole: never waited for, never larger than what they can be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hyperqwen.errors import BadInputError

TOML_LIMIT = 1 << 20
KEY_LIMIT = 4 << 10
RECORD_LIMIT = 64 << 10
"""Bytes of what is read: a key file, a record, a TOML file."""


def read_regular(path: Path, limit: int) -> bytes:
    """What the regular file `path` holds, at most `limit` bytes.

    Raises BadInputError for a folder, a pipe, a socket or a device (a pipe would be waited for without end), and for
    a larger file; OSError where it cannot be opened or read.
    """
    # Without O_NONBLOCK the open itself waits for a pipe's writer; a regular file's reads do not change by it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        regular = stat.S_ISREG(os.fstat(handle).st_mode)
        # One byte more than allowed: what a file's size says may change while it is read.
        data = _read(handle, limit + 1) if regular else b""
    finally:
        os.close(handle)
    if not regular:
        raise BadInputError(f"{path} is no file: a folder, a pipe or a device", "name a regular file")
    if len(data) > limit:
        raise BadInputError(f"{path} is larger than {limit:,} bytes", "name the file that was meant")
    return data


def read_regular_text(path: Path, limit: int) -> str:
    """The same as UTF-8 text; raises UnicodeDecodeError where it is none."""
    return read_regular(path, limit).decode("utf-8")


def _read(handle: int, most: int) -> bytes:
    parts: list[bytes] = []
    while most and (part := os.read(handle, most)):
        parts.append(part)
        most -= len(part)
    return b"".join(parts)
