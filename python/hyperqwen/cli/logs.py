"""`hyperqwen logs`: what a server that runs here, or the last one that ran, has said."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import click

from hyperqwen.cli.doctor import cache_option, last_logs
from hyperqwen.errors import BadInputError, HyperqwenError, MissingError, UnsuitableError
from hyperqwen.runtime import folders, records
from hyperqwen.runtime.records import Record

POLL_SECONDS = 0.25
_CHUNK = 1 << 16
_JOURNAL = "a service's log is in the journal (journalctl -u hyperqwen-B), a container's in docker logs or podman logs"

port_option = click.option("--port", type=click.IntRange(1, 65535), help="The server on this port.")
name_option = click.option("--profile", metavar="NAME", help="The server of this profile: A to E, demo.")


@click.command(context_settings={"show_default": True})
@port_option
@name_option
@click.option("--follow", "-f", is_flag=True, help="Go on printing what comes, through restarts, until ctrl-C.")
@click.option("--lines", "-n", type=click.IntRange(0), default=100, help="How many of the last lines.")
@cache_option
def command(port: int | None, profile: str | None, follow: bool, lines: int, cache_dir: Path | None) -> None:
    """Print the end of a server's log: of the one that runs, else of the last one that did.

    Which file it is goes to stderr. Without --port or --profile there has to be one server only.
    """
    folder = logs_of(cache_dir)
    log = find(folder, port, profile)
    click.echo(f"hyperqwen: {log}", err=True)
    try:
        sys.stdout.flush()
        out = sys.stdout.buffer
        with Tail(log) as tail:
            _write(out, tail.last(lines))
            while follow:
                _write(out, tail.news(lambda: click.echo(f"hyperqwen: {log} begins anew", err=True)))
                time.sleep(POLL_SECONDS)
    except FileNotFoundError:
        raise MissingError(f"the log {log} is gone", "start the server again, or name another by --port") from None


def logs_of(cache_dir: Path | None) -> Path:
    """Where the logs and records of this user's servers are; raises UnsuitableError where there is no such place."""
    folder = folders.logs_folder(os.environ, cache_dir)
    if folder is None:
        raise UnsuitableError(
            "neither XDG_STATE_HOME nor HOME says where logs are", "name the server's --cache-dir, or set HOME"
        )
    return folder


def chosen(running: Sequence[Record], port: int | None, profile: str | None) -> list[Record]:
    """Those of `running` that were asked for."""
    return [
        record
        for record in running
        if (port is None or record.port == port)
        and (profile is None or record.profile.casefold() == profile.casefold())
    ]


def described(record: Record) -> str:
    """One line on a running server."""
    state = "stopping" if record.stopping else "ready" if record.ready else "starting"
    return f"--port {record.port}: profile {record.profile}, process {record.pid}, {state}"


def only(found: Sequence[Record], verb: str) -> Record:
    """The one record of `found`; raises BadInputError, with a list of them, for several."""
    if len(found) > 1:
        lines = "\n".join(f"  {described(record)}" for record in found)
        raise BadInputError(f"{len(found)} servers run:\n{lines}", f"name the one to {verb} by its --port")
    return found[0]


def find(folder: Path, port: int | None, profile: str | None) -> Path:
    """The log in `folder` that is asked for. Raises BadInputError for several, MissingError for none."""
    running = chosen(records.found(folder, tidy=False), port, profile)
    if running:
        record = only(running, "read")
        if record.log is None:
            raise MissingError(
                f"the server on port {record.port} keeps no log: it was started with --verbose",
                f"look where its launcher (process {record.pid}) writes: a terminal, or of a service "
                f"journalctl -u hyperqwen-{record.profile}, of a container docker logs or podman logs",
            )
        return record.log
    if profile is not None:
        raise MissingError(
            f"no server of profile {profile} runs", "name the last one by its --port, or none for the newest log"
        )
    past = [log for log in last_logs(folder) if port is None or re.fullmatch(rf"(?:serve|demo)-{port}", log.stem)]
    if not past:
        which = "" if port is None else f" of a server on port {port}"
        raise MissingError(
            f"there is no log{which} in {folder}", f"name the --cache-dir that the server was started with; {_JOURNAL}"
        )
    return past[0]


class Tail:
    """A log that is read from its end on, by its name: a file that takes its place is read from its beginning.

    Raises FileNotFoundError at first where there is none; later, one that is gone may come again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = self._open()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def last(self, lines: int) -> Iterator[bytes]:
        """The last `lines` lines that are there, in pieces."""
        end = self._file.seek(0, os.SEEK_END)
        start, breaks = end, 0
        while start > 0 and lines:
            size = min(_CHUNK, start)
            self._file.seek(start - size)
            piece = self._file.read(size)
            # The end of the last line begins no other.
            at = len(piece) - 1 if start == end and piece.endswith(b"\n") else len(piece)
            while (at := piece.rfind(b"\n", 0, at)) >= 0:
                breaks += 1
                if breaks == lines:
                    start += at + 1 - size
                    break
            if breaks == lines:
                break
            start -= size
        self._file.seek(start)
        left = end - start
        while left > 0 and (piece := self._file.read(min(_CHUNK, left))):
            left -= len(piece)
            yield piece

    def news(self, anew: Callable[[], None]) -> Iterator[bytes]:
        """What came since, in pieces; `anew` is called before the contents of another file, or of one cut short."""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            anew()
            self._file.seek(0)
        yield from self._rest()
        try:
            there, here = self._path.stat(), os.fstat(self._file.fileno())
        except FileNotFoundError:
            return
        if (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino):
            # It was renamed between the two looks, and may have been written to until then.
            yield from self._rest()
            try:
                file = self._open()
            except FileNotFoundError:
                return
            self._file.close()
            self._file = file
            anew()
            yield from self._rest()

    def _rest(self) -> Iterator[bytes]:
        while piece := self._file.read(_CHUNK):
            yield piece

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except PermissionError as error:
            raise UnsuitableError(
                f"the log {self._path} cannot be read: {error.strerror}", "read it as the user who serves"
            ) from None
        except IsADirectoryError:
            raise HyperqwenError(f"the log {self._path} is a folder", "move it away") from None


def _write(out: BinaryIO, pieces: Iterator[bytes]) -> None:
    for piece in pieces:
        out.write(piece)
    out.flush()
