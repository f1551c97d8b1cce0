"""`hyperqwen down`: stop servers of ours, and wait until they have."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from hyperqwen.cli.doctor import cache_option
from hyperqwen.cli.logs import chosen, logs_of, name_option, only, port_option
from hyperqwen.errors import BadInputError, HyperqwenError, MissingError, UnsuitableError
from hyperqwen.runtime import records
from hyperqwen.runtime.records import Record

# Between the signal that lets requests finish and the one that does not: both have to be noticed.
_SECOND_SECONDS = 1.0


@dataclass(frozen=True)
class Stopped:
    """What became of one server. how: "stopped", or "gone" for one that had ended before it was told to."""

    record: Record
    how: str
    seconds: float

    def __str__(self) -> str:
        who = f"profile {self.record.profile} on port {self.record.port} (process {self.record.pid})"
        return f"{who} had ended by itself" if self.how == "gone" else f"{who} stopped after {self.seconds:.1f} s"

    def report(self) -> dict[str, object]:
        """As JSON has it."""
        record = self.record
        return {
            "profile": record.profile,
            "port": record.port,
            "pid": record.pid,
            "how": self.how,
            "seconds": round(self.seconds, 3),
        }


@click.command(context_settings={"show_default": True})
@port_option
@name_option
@click.option("--all", "every", is_flag=True, help="Every server of this user.")
@click.option(
    "--timeout",
    type=click.FloatRange(1, 7200),
    default=300,
    help="Seconds to wait for the end. Running requests get server.drain_seconds of them.",
)
@click.option("--now", is_flag=True, help="Do not let running requests finish.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array instead of text.")
@cache_option
def command(
    port: int | None,
    profile: str | None,
    every: bool,
    timeout: float,
    now: bool,
    as_json: bool,
    cache_dir: Path | None,
) -> None:
    """Stop a server: it takes no more requests, finishes those that run, and ends.

    Without --port, --profile or --all there has to be one server only. Exit 0 once they have ended, and also when none
    runs; 4 when the one that is named does not run; 1 when it has not ended in time. A systemd service is stopped by
    systemctl.
    """
    if every and (port is not None or profile is not None):
        raise BadInputError("--all and a server's name exclude each other", "give --all, or --port, or --profile")
    folder = logs_of(cache_dir)
    running = records.found(folder)
    targets = chosen(running, port, profile)
    if not targets:
        if port is not None or profile is not None:
            which = " and ".join(
                text for text in (f"profile {profile}" if profile else "", f"port {port}" if port else "") if text
            )
            raise MissingError(f"no server of {which} runs that has its record in {folder}", _running(running))
        click.echo("hyperqwen: none runs", err=True)
    elif not every:
        targets = [only(targets, "stop")]
    done = _stop(targets, timeout, now)
    if as_json:
        click.echo(json.dumps([stopped.report() for stopped in done], indent=2))
    else:
        for stopped in done:
            click.echo(str(stopped))


def _running(running: list[Record]) -> str:
    if not running:
        return "none runs; one that was started with --cache-dir has its record there: give the same"
    return "these run: " + ", ".join(f"profile {record.profile} on --port {record.port}" for record in running)


def _stop(targets: list[Record], timeout: float, now: bool) -> list[Stopped]:
    """Stop them side by side; raises HyperqwenError for those that have not ended after `timeout` seconds."""
    began = time.monotonic()
    deadline = began + timeout
    done: list[Stopped] = []
    with _open(targets) as opened:
        waiting: list[tuple[Record, int]] = []
        for record, handle in opened:
            # One that is stopping would take another signal for "at once".
            leave = record.stopping and not now
            if handle is None or not (leave or _told(record, handle)):
                done.append(Stopped(record, "gone", 0.0))
                continue
            waiting.append((record, handle))
            who = f"profile {record.profile} on port {record.port} (process {record.pid})"
            said = f"{who} is stopping already" if leave else f"told {who} to stop"
            click.echo(f"hyperqwen: {said}", err=True)
        if now and waiting:
            waiting = _await(waiting, min(deadline, time.monotonic() + _SECOND_SECONDS), began, done)
            for record, handle in waiting:
                _told(record, handle)
        left = _await(waiting, deadline, began, done)
    if left:
        names = ", ".join(f"port {record.port} (process {record.pid})" for record, _ in left)
        how = "kill -KILL the process, and its engine ends with it" if now else "wait, or end it at once: --now"
        raise HyperqwenError(f"not ended after {timeout:g} s: {names}", how)
    return done


@contextmanager
def _open(targets: list[Record]) -> Iterator[list[tuple[Record, int | None]]]:
    """A handle of each target's very process, None for one that has ended: a number alone may be another's by now."""
    opened: list[tuple[Record, int | None]] = []
    try:
        for record in targets:
            handle: int | None
            try:
                handle = os.pidfd_open(record.pid)
            except ProcessLookupError:
                handle = None
            opened.append((record, handle))
            # Only now: a process that is still the recorded one is the one that the handle was opened of.
            if handle is not None and not record.alive:
                os.close(handle)
                opened[-1] = (record, None)
        yield opened
    finally:
        for _, handle in opened:
            if handle is not None:
                os.close(handle)


def _told(record: Record, handle: int) -> bool:
    """Send SIGTERM; False for a process that has ended. Raises UnsuitableError for another user's."""
    try:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return False
    except PermissionError:
        raise UnsuitableError(
            f"process {record.pid} (port {record.port}) is another user's", "stop it as that user, or as root"
        ) from None
    return True


def _await(
    waiting: list[tuple[Record, int]], deadline: float, began: float, done: list[Stopped]
) -> list[tuple[Record, int]]:
    """Wait for all of them, until `deadline` (monotonic): those that end go to `done`, the rest come back."""
    left = {handle: record for record, handle in waiting}
    poll = select.poll()
    for handle in left:
        poll.register(handle, select.POLLIN)
    while left:
        seconds = deadline - time.monotonic()
        if seconds <= 0:
            break
        for handle, _ in poll.poll(seconds * 1000):
            poll.unregister(handle)
            done.append(Stopped(left.pop(handle), "stopped", time.monotonic() - began))
    return [(record, handle) for handle, record in left.items()]
