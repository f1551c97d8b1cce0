"""What an engine's log says of its start: shards loaded, compilation, the pool, graphs captured.

The status pipe (`hyperqwen.engine.serve`) tells the stages; within the long one, loading, only the log moves. Its words
are those of `hyperqwen.engine.messages`. A line that is not known is no event.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from hyperqwen.engine import messages
from hyperqwen.engine.messages import Message

Phase = Literal["weights", "compile", "pool", "graphs", "warm"]
Values = Mapping[str, str]


@dataclass(frozen=True)
class Event:
    """Something that the start has come to. `final` ends the phase, and is worth a line of its own."""

    phase: Phase
    text: str
    final: bool = False


def _bar(bars: tuple[Message, ...]) -> re.Pattern[str]:
    """A drawing of one of the progress bars: its name, "38%", "3/8"."""
    names = "|".join(messages.pattern(bar).pattern for bar in bars)
    return re.compile(rf"(?:{names}).*?: +\d+%.*?\b(?P<n>\d+)/(?P<of>\d+)\b")


def _seconds(values: Values) -> str:
    return f"{float(values['s']):.0f} s"


_BARS: tuple[tuple[Phase, re.Pattern[str], str], ...] = (
    ("weights", _bar(messages.SHARDS), "loading weights: {n} of {of} shards"),
    ("graphs", _bar(messages.CAPTURES), "capturing CUDA graphs: {n} of {of}"),
)
_LINES: tuple[tuple[Phase, tuple[Message, ...], Callable[[Values], str], bool], ...] = (
    ("weights", (messages.WEIGHTS_READ,), lambda said: f"weights read in {float(said['s']):.1f} s", True),
    ("weights", messages.LOADED, lambda said: f"weights: {float(said['gib']):.2f} GiB in {_seconds(said)}", True),
    ("compile", (messages.TRACED,), lambda _: "compiling the model", False),
    ("compile", (messages.COMPILES,), lambda said: f"compiling the model: a part took {_seconds(said)}", False),
    ("compile", (messages.COMPILED,), lambda said: f"compiled in {_seconds(said)}", True),
    ("pool", (messages.POOL_MEMORY,), lambda said: f"memory of the pool: {float(said['gib']):.2f} GiB", True),
    (
        "pool",
        (messages.POOL,),
        lambda said: f"pool: {said['tokens']} tokens, {said['requests']} requests of {said['context']}",
        True,
    ),
    ("graphs", messages.CAPTURED, lambda said: f"CUDA graphs: {float(said['gib']):.2f} GiB in {said['s']} s", True),
    ("warm", (messages.SET_UP,), lambda said: f"engine set up in {_seconds(said)}", True),
)


def events(text: str) -> Iterator[Event]:
    """The events in a piece of the log, in order. A progress bar draws over its line; each drawing is one."""
    for line in re.split(r"[\r\n]+", text):
        event = _event(line)
        if event is not None:
            yield event


def _event(line: str) -> Event | None:
    for phase, bar, shown in _BARS:
        found = bar.search(line)
        if found is not None:
            return Event(phase, shown.format(**found.groupdict()))
    for phase, known, tell, final in _LINES:
        for message in known:
            values = messages.values(message, line)
            if values is not None:
                return Event(phase, tell(dict(values)), final)
    return None
