"""The service manager's side of a start: readiness, status and watchdog, as sd_notify(3) describes the protocol.

One datagram a message, to the Unix socket that NOTIFY_SOCKET names. The engine never sees that variable: what it said
would count as the service's word.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from hyperqwen.errors import UnsuitableError

SOCKET = "NOTIFY_SOCKET"


class Notifier:
    """Tells the service manager; silent where none listens.

    watchdog: seconds within which it wants a sign of life; None where it wants none.
    """

    def __init__(self, environ: Mapping[str, str], pid: int | None = None) -> None:
        """Raises UnsuitableError for variables that no service manager sets."""
        self._address = _address(environ.get(SOCKET, ""))
        self.watchdog = _watchdog(environ, os.getpid() if pid is None else pid) if self._address else None

    @property
    def active(self) -> bool:
        return self._address is not None

    def ready(self, status: str) -> None:
        """The service does what it is for."""
        self.send("READY=1", f"STATUS={_line(status)}")

    def status(self, text: str, *, extend_seconds: float | None = None) -> None:
        """What it is doing; `extend_seconds` asks for at least so much more time to start (or to stop)."""
        extend = () if extend_seconds is None else (f"EXTEND_TIMEOUT_USEC={round(extend_seconds * 1e6)}",)
        self.send(f"STATUS={_line(text)}", *extend)

    def alive(self) -> None:
        """A sign of life for the watchdog."""
        self.send("WATCHDOG=1")

    def stopping(self, status: str) -> None:
        self.send("STOPPING=1", f"STATUS={_line(status)}")

    def send(self, *fields: str) -> None:
        """One message. A service manager that is gone or busy is no reason to stop serving."""
        if self._address is None:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.settimeout(1.0)
            try:
                channel.sendto("\n".join(fields).encode(), self._address)
            except OSError:
                return


def _address(text: str) -> str | None:
    if not text:
        return None
    if text[0] not in "/@" or len(text) < 2:
        raise UnsuitableError(
            f"{SOCKET} is {text!r}, which is neither a path nor an abstract socket (@…)",
            f"unset {SOCKET} where no service manager runs this",
        )
    # An abstract name begins with a zero byte; the variable cannot hold one.
    return f"\0{text[1:]}" if text[0] == "@" else text


def _watchdog(environ: Mapping[str, str], pid: int) -> float | None:
    """Seconds of WATCHDOG_USEC, where it is meant for the process `pid`."""
    text = environ.get("WATCHDOG_USEC")
    if text is None or environ.get("WATCHDOG_PID", str(pid)) != str(pid):
        return None
    # 20 digits hold any number of 64 bits; isdecimal alone takes digits of other scripts.
    if not (text.isascii() and text.isdecimal() and len(text) <= 20 and int(text)):
        raise UnsuitableError(f"WATCHDOG_USEC is {text[:40]!r}, must be microseconds", "unset it, or set WatchdogSec=")
    return int(text) / 1e6


def _line(text: str) -> str:
    """A message's fields end with the line."""
    return " ".join(text.split())
