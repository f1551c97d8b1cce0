"""What the progress line says, and when."""

from __future__ import annotations

import io
import time

import pytest

from hyperqwen.pins.progress import Progress, clock, human


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1500, "1.5 kB"),
        (99_949, "99.9 kB"),
        (526_574_961, "527 MB"),
        (4_022_957_195, "4.02 GB"),
    ],
)
def test_sizes(size: int, text: str) -> None:
    assert human(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (42, "42 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (3720, "1 h 02 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert clock(seconds) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_rate_and_time_left_are_those_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    shown = Progress(io.StringIO(), files=3, total=100_000_000)
    shown.moved(40_000_000, by_wire=False)
    for _ in range(20):
        clock.now += 1
        shown.moved(1_000_000)
        shown.rate()
    for _ in range(20):
        clock.now += 1
        shown.moved(500_000)
        shown.rate()
    assert shown.rate() == pytest.approx(500_000)
    assert shown.line() == " 70 %  70.0 MB of 100 MB, 0 of 3 files, 500 kB/s, 1 min 00 s left"


def test_elsewhere_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    out = io.StringIO()
    shown = Progress(out, files=1, total=10)
    for _ in range(100):
        clock.now += 1
        shown.show()
    shown.file_done()
    shown.show(now=True)
    lines = out.getvalue().splitlines()
    assert 5 <= len(lines) <= 8 and "\r" not in out.getvalue()
    assert "1 of 1 files" in lines[-1]


def test_a_terminal_has_one_line_that_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    out = Terminal()
    shown = Progress(out, files=2, total=1000)
    for _ in range(5):
        clock.now += 1
        shown.moved(100)
        shown.show()
    shown.say("refused")
    shown.show(now=True)
    shown.close()
    assert out.getvalue().count("\n") == 2, "one for the message, one at the end"
    assert "refused\n" in out.getvalue()


def test_quiet_means_quiet() -> None:
    out = Terminal()
    shown = Progress(out, files=1, total=10, quiet=True)
    shown.show(now=True)
    shown.say("x")
    shown.close()
    assert out.getvalue() == ""
