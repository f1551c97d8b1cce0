"""What runs: one small file for each server of ours, so that `hyperqwen logs` and `down` find it by its port.

A record is beside the logs, in `runs/`. It outlives a server that was killed; who reads it asks the kernel whether that
process is still the same one.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field

from hyperqwen.errors import BadInputError, UnsuitableError
from hyperqwen.files import RECORD_LIMIT, read_regular_text

FOLDER = "runs"
# The kernel counts a process's start from boot in hundredths, and the time of boot is rounded to a second.
_SAME_START_SECONDS = 2.0


class Record(BaseModel):
    """One run of a server.

    command: of ours, which started it. profile: its name. model: what clients call the model.
    pid, started: of the launcher (started in seconds of Unix time). engine_pid: of the engine, in a process group of
    its own. log: the engine's, None where it speaks on the launcher's stderr. ready: whether a token has come.
    stopping: whether it finishes its last requests, so that one more signal would end them.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    command: Literal["demo", "serve"]
    profile: str
    model: str
    host: str
    port: Annotated[int, Field(ge=1, le=65535)]
    url: str
    pid: Annotated[int, Field(ge=1)]
    started: float
    engine_pid: int | None = None
    log: Path | None = None
    ready: bool = False
    stopping: bool = False

    @property
    def alive(self) -> bool:
        """Whether the launcher still runs: a process of that number that started when this one did."""
        try:
            process = psutil.Process(self.pid)
            same = abs(process.create_time() - self.started) < _SAME_START_SECONDS
            return same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def own_start() -> float:
    """When this process started, as a record says it."""
    return psutil.Process().create_time()


def folder(logs: Path) -> Path:
    """Where the records of servers are whose logs are in `logs`."""
    return logs / FOLDER


def write(logs: Path, record: Record) -> Path:
    """Write the record, in place of an earlier one of the same launcher; raises UnsuitableError."""
    place = folder(logs)
    path = place / f"{record.port}-{record.pid}.json"
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(prefix=".", dir=place)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(record.model_dump_json(indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UnsuitableError(
            f"the record of this run cannot be written: {path}: {error.strerror}", "name a folder that you may write"
        ) from None
    return path


def found(logs: Path, *, tidy: bool = True) -> list[Record]:
    """The servers that run, by port. What is left of others is removed if `tidy`; a file that is no record is not."""
    running = []
    for path in sorted(folder(logs).glob("*.json")):
        try:
            record = Record.model_validate(json.loads(read_regular_text(path, RECORD_LIMIT)))
        except (OSError, BadInputError, ValueError, RecursionError, OverflowError):
            continue
        if record.alive:
            running.append(record)
        elif tidy:
            with contextlib.suppress(OSError):
                path.unlink()
    return sorted(running, key=lambda record: (record.port, record.pid))


@contextmanager
def kept(logs: Path, record: Record) -> Iterator[None]:
    """A record while the block runs."""
    path = write(logs, record)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
