"""How far a transfer is, on stderr: one line that updates on a terminal, a line every few seconds elsewhere.

Runs on a bare Python 3.9.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import deque
from typing import TextIO

_WINDOW_S = 8.0
_SPARSE_S = 15.0


def human(size: float) -> str:
    """Bytes in decimal units, as registries and disks count them: 526.6 MB."""
    for unit in ("B", "kB", "MB"):
        if abs(size) < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or abs(size) >= 99.95 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def clock(seconds: float) -> str:
    """A duration: 42 s, 3 min 05 s, 1 h 02 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Progress:
    """Counts bytes from several threads; `show` is called by one. The rate is that of the last few seconds."""

    def __init__(self, out: TextIO, *, files: int, total: int, quiet: bool = False) -> None:
        self.out = out
        self.files = files
        self.total = total
        self.quiet = quiet
        self.tty = out.isatty()
        self.done = 0
        self.files_done = 0
        self.note = ""
        self._arrived = 0
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])
        self._shown_at = time.monotonic()
        self._width = 0

    def moved(self, count: int, by_wire: bool = True) -> None:
        """`count` more bytes are there; those already on disk do not count as speed."""
        with self._lock:
            self.done += count
            if by_wire:
                self._arrived += count

    def file_done(self) -> None:
        with self._lock:
            self.files_done += 1

    def rate(self) -> float:
        """Bytes per second over the last few seconds."""
        now = time.monotonic()
        with self._lock:
            self._samples.append((now, self._arrived))
            while len(self._samples) > 2 and now - self._samples[1][0] > _WINDOW_S:
                self._samples.popleft()
            since, base = self._samples[0]
            return max(self._arrived - base, 0) / (now - since) if now > since else 0.0

    def line(self) -> str:
        rate = self.rate()
        share = f"{100 * self.done // self.total} %" if self.total else "100 %"
        left = ""
        if rate > 1000 and self.done < self.total:
            left = f", {clock((self.total - self.done) / rate)} left"
        note = f" · {self.note}" if self.note else ""
        counts = f"{human(self.done)} of {human(self.total)}, {self.files_done} of {self.files} files"
        return f"{share:>5}  {counts}, {human(rate)}/s{left}{note}"

    def show(self, *, now: bool = False) -> None:
        """Draw, if it is time to."""
        if self.quiet:
            return
        moment = time.monotonic()
        if self.tty:
            if now or moment - self._shown_at >= 0.2:
                width = shutil.get_terminal_size().columns
                self.out.write("\r" + self.line()[: width - 1].ljust(min(self._width, width - 1)))
                self.out.flush()
                self._width = len(self.line())
                self._shown_at = moment
        elif now or moment - self._shown_at >= _SPARSE_S:
            self.say(self.line().strip())
            self._shown_at = moment

    def say(self, text: str) -> None:
        """A line of its own, above the one that updates."""
        if self.quiet:
            return
        if self.tty and self._width:
            self.out.write("\r" + " " * min(self._width, shutil.get_terminal_size().columns - 1) + "\r")
            self._width = 0
        self.out.write(text + "\n")
        self.out.flush()

    def close(self) -> None:
        """End the updating line."""
        if self.tty and self._width and not self.quiet:
            self.out.write("\n")
            self.out.flush()
            self._width = 0
