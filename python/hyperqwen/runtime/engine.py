"""The engine as a child process: started with a socket, followed by its stages, stopped with all that it started."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hyperqwen.errors import HyperqwenError, UnsuitableError

SERVE_MODULE = "hyperqwen.engine.serve"
TAIL_LINES = 10
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

    def __init__(self, process: subprocess.Popen[bytes], status: int, log: Path | None) -> None:
        self._process = process
        self._status = status
        self._log = log
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
            log: file for everything that the engine says; None lets it speak on this process's stderr.

        Raises UnsuitableError when the program or the log cannot be opened.
        """
        reader, writer = os.pipe()
        output = None
        try:
            output = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
            process = subprocess.Popen(
                # -P and -s: neither the working directory nor the user's own packages may shadow the engine's.
                [str(python), "-P", "-s", "-m", SERVE_MODULE, *flags],
                cwd=folder,
                env={
                    **environment,
                    "HYPERQWEN_LISTEN_FD": str(listener.fileno()),
                    "HYPERQWEN_STATUS_FD": str(writer),
                },
                stdin=subprocess.DEVNULL,
                stdout=2 if output is None else output,
                stderr=2 if output is None else output,
                pass_fds=(listener.fileno(), writer),
                start_new_session=True,
            )
        except OSError as error:
            os.close(reader)
            raise UnsuitableError(
                f"the engine cannot be started: {error.filename or python}: {error.strerror}",
                "build it again: ./hq build .#demo",
            ) from None
        finally:
            os.close(writer)
            if output is not None:
                os.close(output)
        listener.close()
        os.set_blocking(reader, False)
        return cls(process, reader, log)

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

    def stop(self, grace: float = 10.0) -> None:
        """End the engine and everything in its process group: SIGTERM, then SIGKILL after `grace` seconds.

        Interrupted by an exception (a second signal), it kills at once before the exception goes on.
        """
        if self._reaped:
            return
        try:
            if self.returncode is None:
                self._process.terminate()
                deadline = time.monotonic() + grace
                while self.returncode is None and time.monotonic() < deadline:
                    time.sleep(0.02)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            self._reaped = True
            if self._status >= 0:
                os.close(self._status)
                self._status = -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cut(line: str, width: int = 200) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
