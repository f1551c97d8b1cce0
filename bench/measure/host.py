"""This host: what it is, and commands run on it with their time and memory."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperqwen.errors import HyperqwenError, UnsuitableError

GIB = 1 << 30
# How often the memory of a build's processes is looked at.
INTERVAL = 0.05


def say(text: str) -> None:
    """Progress, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Done:
    """A command that has ended: stdout, stderr (if it was captured), wall-clock seconds, and peak memory in bytes.

    largest: the greatest resident size of any one of its processes, from the kernel (exact).
    together: the greatest sum of private and shared anonymous memory of all its processes at one moment, sampled.
    """

    command: str
    code: int
    stdout: str
    stderr: str
    seconds: float
    largest: int = 0
    together: int = 0

    def checked(self) -> Done:
        """This, if the command succeeded; raises HyperqwenError with the end of what it said otherwise."""
        if self.code != 0:
            tail = "\n    ".join((self.stderr.strip() or self.stdout.strip()).splitlines()[-8:])
            raise HyperqwenError(f"exit code {self.code} of: {self.command}" + (f"\n    {tail}" if tail else ""))
        return self


def descendants(pid: int) -> list[int]:
    """`pid` and every process below it that is there now."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                found += [int(child) for child in children.read_text().split()]
            except OSError:
                # Its thread ended between the listing and the reading.
                continue
    return found


def unshared_memory(pid: int) -> int:
    """Bytes of a process that no file backs (heap, stacks, tmpfs and shared memory); 0 if it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    sizes = [line.split() for line in text.splitlines() if line.startswith(("RssAnon:", "RssShmem:"))]
    return sum(int(words[1]) * 1024 for words in sizes)


class _Watch(threading.Thread):
    """Samples the memory of a process and all below it until told to stop."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.peak, self.ended = pid, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(INTERVAL):
            self.peak = max(self.peak, sum(map(unshared_memory, descendants(self.pid)[1:])))


def timed(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    quiet: bool = False,
    memory: bool = False,
) -> Done:
    """Run `command` and wait for it. Its stdout is kept; its stderr is shown as it comes, or kept with `quiet`.

    `memory` asks for the peak memory of what it starts: `largest` then holds it and its children that it waited for.
    """
    began = time.monotonic()
    child = subprocess.Popen(
        list(command),
        env=None if environ is None else dict(environ),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if quiet else None,
        start_new_session=False,
    )
    watch = _Watch(child.pid)
    if memory:
        watch.start()
    kept: dict[str, bytes] = {"stderr": b""}
    reader = threading.Thread(target=lambda: kept.update(stderr=child.stderr.read() if child.stderr else b""))
    reader.start()
    try:
        assert child.stdout is not None
        stdout = child.stdout.read()
        # wait4, not wait: it alone tells what this child and its own children used.
        _, status, usage = os.wait4(child.pid, 0)
    except BaseException:
        child.send_signal(signal.SIGTERM)
        child.wait()
        raise
    finally:
        watch.ended.set()
    seconds = time.monotonic() - began
    reader.join()
    child.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    stderr = kept["stderr"]
    return Done(
        command=shlex.join(command),
        code=child.returncode,
        stdout=stdout.decode(errors="replace"),
        stderr=stderr.decode(errors="replace"),
        seconds=seconds,
        largest=usage.ru_maxrss * 1024,
        together=watch.peak,
    )


def captured(command: Sequence[str], *, environ: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
    """stdout of a command that must succeed."""
    return timed(command, environ=environ, cwd=cwd, quiet=True).checked().stdout


def require(*programs: str, root: bool = True) -> None:
    """Raise UnsuitableError unless these programs are on PATH and, with `root`, this is root on x86-64 Linux."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise UnsuitableError(f"this is {platform.system()} {platform.machine()}", "run it on x86-64 Linux")
    if root and os.geteuid() != 0:
        raise UnsuitableError("only root can make the namespaces and builds that are measured", "run it with sudo")
    missing = [program for program in programs if not shutil.which(program)]
    if missing:
        raise UnsuitableError(f"not found: {', '.join(missing)}", "install it, and have it on PATH")


def require_space(folder: Path, needed: float, what: str) -> None:
    """Raise UnsuitableError unless `needed` bytes are free where `folder` is."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UnsuitableError(
            f"{what} needs {needed / GIB:.0f} GiB below {folder}, where {free / GIB:.1f} GiB are free",
            "free space, or name a folder on another disk with --work",
        )


def machine() -> dict[str, Any]:
    """What was measured on: processor, cores, memory, kernel, system. Nothing that names the machine."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    release = Path("/etc/os-release").read_text() if Path("/etc/os-release").exists() else ""
    name = [line.partition("=")[2].strip('"') for line in release.splitlines() if line.startswith("PRETTY_NAME=")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / GIB, 1),
        "kernel": platform.release(),
        "system": name[0] if name else platform.system(),
    }
