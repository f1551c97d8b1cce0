"""The engine as a child process: started with a socket, followed by its stages, stopped with all that it started."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from hyperqwen.errors import HyperqwenError, UnsuitableError

SERVE_MODULE = "hyperqwen.engine.serve"
TAIL_LINES = 10
# `hyperqwen.engine.serve` answers it with the stacks of all threads.
_DUMP = signal.SIGUSR1
_DUMP_SECONDS = 0.5
# What is kept of an engine's words until they are asked for.
_NEWS_BYTES = 1 << 20
# Of words that nobody takes from stderr: then the oldest go.
_UNSAID_BYTES = 4 << 20
_CHUNK_BYTES = 1 << 16
_STDERR = 2
# Nothing else sends it unasked, and the one that is killed has no chance to log why.
_OUT_OF_MEMORY = "the kernel does that when memory runs out (`dmesg` tells): free some and start again"
# The last line of a traceback, with or without vLLM's log prefix: "ValueError: …", "torch.OutOfMemoryError: …".
_EXCEPTION = re.compile(r"(?:\A|\] )(?:\w+\.)*\w+(?:Error|Exception|Interrupt): ")


class EngineError(HyperqwenError):
    """The engine ended by itself, or is not ready in time (exit 1)."""


class Engine:
    """One engine process in a process group of its own.

    Signals of the terminal do not reach it: `stop` does, and so the order of a shutdown is ours.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], status: int, log: Path | None, echo: _Echo | None = None
    ) -> None:
        self._process = process
        self._status = status
        self._log = log
        self._echo = echo
        self._read = 0
        self._pending = b""
        self._reaped = False

    @classmethod
    def start(
        cls,
        python: Path,
        flags: Sequence[str],
        environment: Mapping[str, str],
        *,
        listener: socket.socket,
        folder: Path,
        log: Path | None,
    ) -> Engine:
        """Start `python -m hyperqwen.engine.serve FLAGS` on `listener`, which belongs to the engine afterwards.

        Args:
            folder: working directory; the engine finds nothing there to import.
            log: file for everything that the engine says; None puts it on this process's stderr as it comes.

        Raises UnsuitableError when the program or the log cannot be opened.
        """
        reader, writer = os.pipe()
        said, output = -1, -1
        try:
            if log is None:
                said, output = os.pipe()
            else:
                output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            process = subprocess.Popen(
                # -P and -s: neither the working directory nor the user's own packages may shadow the engine's.
                [str(python), "-P", "-s", "-m", SERVE_MODULE, *flags],
                cwd=folder,
                env={
                    **environment,
                    "HYPERQWEN_LISTEN_FD": str(listener.fileno()),
                    "HYPERQWEN_STATUS_FD": str(writer),
                    "HYPERQWEN_LAUNCHER_PID": str(os.getpid()),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(listener.fileno(), writer),
                start_new_session=True,
            )
        except OSError as error:
            os.close(reader)
            if said >= 0:
                os.close(said)
            raise UnsuitableError(
                f"the engine cannot be started: {error.filename or python}: {error.strerror}",
                "start it through `./hq run .#serve` or `.#demo`, which build it",
            ) from None
        finally:
            os.close(writer)
            if output >= 0:
                os.close(output)
        try:
            listener.close()
            os.set_blocking(reader, False)
            return cls(process, reader, log, _Echo(said) if said >= 0 else None)
        except BaseException:
            # Nobody else knows of it yet.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(reader)
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status once the engine has ended (negative: by that signal), else None.

        The process is only looked at: until `stop` reaps it, its number and so its group cannot become another's.
        """
        if self._reaped:
            return self._process.returncode
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def stages(self, timeout: float) -> list[str]:
        """The stages that began since the last call; waits up to `timeout` seconds for one."""
        if self._status < 0:
            time.sleep(timeout)
            return []
        if not select.select([self._status], [], [], timeout)[0]:
            return []
        data = os.read(self._status, 4096)
        if not data:
            os.close(self._status)
            self._status = -1
            return []
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def news(self) -> str:
        """What the engine said since the last call; of very much, the end."""
        if self._echo is not None:
            return self._echo.taken()
        if self._log is None:
            return ""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            end = file.tell()
            file.seek(max(self._read, end - _NEWS_BYTES))
            data = file.read(max(0, end - file.tell()))
            whole = _whole(data)
            self._read = end - len(data) + whole
            return data[:whole].decode(errors="replace")
        return ""

    def failure(self, what: str, remedy: str | None = None) -> EngineError:
        """The error for an engine in trouble: `what`, the log's first exception and last lines, where the rest is.

        `remedy` is what to do about it, where that is known without the log.
        """
        said = self._said()
        cause = next((line for line in said if _EXCEPTION.search(line)), None)
        tail = said[-TAIL_LINES:]
        lines = [what]
        if cause is not None and cause not in tail:
            lines += ["its first error:", f"  | {_cut(cause)}"]
        if tail:
            lines += ["its last words:", *(f"  | {_cut(line)}" for line in tail)]
        fix = f"read {self._log}, or run it again with --verbose" if self._log else "read the engine's messages above"
        return EngineError("\n".join(lines), f"{remedy}; else {fix}" if remedy else fix)

    def check(self) -> None:
        """Raise EngineError when the engine has ended."""
        status = self.returncode
        if status is not None:
            how = f"killed by {_signal_name(-status)}" if status < 0 else f"exit status {status}"
            raise self.failure(
                f"the engine ended by itself ({how})", _OUT_OF_MEMORY if status == -signal.SIGKILL else None
            )

    def _said(self) -> list[str]:
        """The lines of the log that are not blank; of a long log, its end."""
        if self._log is None:
            return []
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - (1 << 20)))
            return [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        return []

    def dump(self) -> list[int]:
        """`dump_stacks` of its processes."""
        return dump_stacks(self.pid)

    def stop(self, grace: float = 10.0, tick: Callable[[], None] | None = None) -> None:
        """End the engine and everything in its process group: SIGTERM, then SIGKILL after `grace` seconds.

        The engine finishes what it has begun meanwhile; `tick` is called now and then. Interrupted by an exception (a
        second signal), it kills at once before the exception goes on.
        """
        if self._reaped:
            return
        try:
            if self.returncode is None:
                self._process.terminate()
                deadline = time.monotonic() + grace
                while self.returncode is None and time.monotonic() < deadline:
                    if tick is not None:
                        tick()
                    time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._reaped = True
            if self._echo is not None:
                self._echo.finish()
            if self._status >= 0:
                os.close(self._status)
                self._status = -1


class _Echo:
    """Copies what the engine says to stderr, and keeps the last of it for the launcher.

    Whoever reads stderr may be slow or gone: the engine waits for neither.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._kept = bytearray()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._copy, name="engine's words", daemon=True)
        self._thread.start()

    def taken(self) -> str:
        """What came since the last call, to the end of a line."""
        with self._lock:
            whole = _whole(self._kept)
            data = bytes(self._kept[:whole])
            del self._kept[:whole]
        return data.decode(errors="replace")

    def finish(self, seconds: float = 2.0) -> None:
        """Wait until the last words are copied."""
        self._thread.join(seconds)

    def _copy(self) -> None:
        unsaid, heard = bytearray(), True
        with open(self._source, "rb", buffering=0) as source:
            speaks = True
            while speaks or unsaid:
                try:
                    ready, free, _ = select.select([source] if speaks else [], [_STDERR] if unsaid else [], [])
                except OSError:
                    # A stderr that is closed.
                    unsaid.clear()
                    heard = False
                    continue
                if ready:
                    data = source.read(_CHUNK_BYTES)
                    speaks = bool(data)
                    self._keep(data or b"")
                    if heard:
                        _append(unsaid, data or b"")
                if free:
                    heard = _say(unsaid)

    def _keep(self, data: bytes) -> None:
        with self._lock:
            self._kept += data
            del self._kept[: max(0, len(self._kept) - _NEWS_BYTES)]


def _append(unsaid: bytearray, data: bytes) -> None:
    """Add to what is to be said; where that gets too much, its first half goes, and a line says so."""
    unsaid += data
    if len(unsaid) > _UNSAID_BYTES:
        lost = _whole(unsaid[: len(unsaid) // 2]) or len(unsaid) // 2
        # On a line of its own: what was said last may end within one.
        unsaid[:lost] = b"\n[hyperqwen: words of the engine are left out here]\n"


def _say(unsaid: bytearray) -> bool:
    """Write the next piece to stderr, which takes one without waiting; False where nobody will read any more."""
    try:
        # A pipe that says it is free has room for that much.
        del unsaid[: os.write(_STDERR, unsaid[: select.PIPE_BUF])]
    except BlockingIOError:
        return True
    except OSError:
        unsaid.clear()
        return False
    return True


def _whole(data: bytes | bytearray) -> int:
    """Length of what is whole lines of `data`; the rest is still being written. A bar is drawn with returns."""
    return max(data.rfind(b"\n"), data.rfind(b"\r")) + 1


def dump_stacks(engine: int) -> list[int]:
    """Let the process `engine` and those below it write their stacks to the log; which of them were asked."""
    asked = []
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(engine)
        for process in [parent, *parent.children(recursive=True)]:
            # The signal ends a process that does not expect it, such as a compiler.
            with contextlib.suppress(OSError, psutil.Error):
                if _expects(process.pid, _DUMP):
                    process.send_signal(_DUMP)
                    asked.append(process.pid)
                    # One after the other: they write word by word, and into the same log.
                    time.sleep(_DUMP_SECONDS)
    return asked


def _expects(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal; raises OSError for one that is gone."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (number - 1) & 1)
    return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cut(line: str, width: int = 200) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
