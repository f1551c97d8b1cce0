"""Whether a server that runs still does what it should: progress for the service manager, and memory on WSL2.

`/health` answers while the engine hangs (vllm#39863), so it is not asked. What counts is whether the engine's own
counters move while it has requests. `hyperqwen.engine.progress` adds two to vLLM's: steps of the scheduler, which move
through a long prefill that has no output yet, and requests that have not been answered, which an engine that hangs
cannot hide behind a number that it no longer updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from hyperqwen.errors import HyperqwenError, UnsuitableError
from hyperqwen.runtime.notify import Notifier

if TYPE_CHECKING:
    from hyperqwen.runtime.gpu import Gpu

STALL_SECONDS = 180.0
"""Without a step for so long, with requests in flight, the engine counts as hung. A kernel that Triton compiles at its
first use takes up to 40 s."""
FIRST_STALL_SECONDS = 900.0
"""The same until the first request after readiness has been answered to its end: FlashInfer builds some of its kernels
with nvcc when they are first wanted, which takes minutes on a slow processor."""

SPILL_SECONDS = 30.0
"""Between two looks at the cards under WSL2."""

STEPS, UNANSWERED = "hyperqwen:engine_steps_total", "hyperqwen:unanswered_requests"
_MOVING = (STEPS, "vllm:iteration_tokens_total_sum", "vllm:generation_tokens_total", "vllm:prompt_tokens_total")
_FINISHED = "vllm:request_success_total"
# Of its label finished_reason: a client that gave up while a kernel was built has not been answered.
_UNFINISHED_REASONS = frozenset({"abort", "error"})
_NEEDED = ("vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:num_requests_waiting")


@dataclass(frozen=True)
class Counters:
    """What the engine counts, over all of its processes.

    moving: counters that only grow, and grow while it works. requests: in flight, running or waiting. answered:
    requests that came to their end.
    """

    moving: tuple[float, ...]
    requests: int
    answered: int = 0

    @property
    def generated(self) -> float:
        """Tokens generated since the start."""
        return self.moving[_MOVING.index("vllm:generation_tokens_total")]

    def __str__(self) -> str:
        said = ", ".join(f"{name} {value:.0f}" for name, value in zip(_MOVING, self.moving, strict=True))
        return f"{self.requests} requests in flight; {said}"


def counters(metrics: str) -> Counters:
    """What `metrics` (of /metrics, in Prometheus' text format) says.

    Raises HyperqwenError where the counters are not there, as of an engine that runs without them.
    """
    values: dict[str, float] = {}
    answered = 0.0
    try:
        for family in text_string_to_metric_families(metrics):
            for sample in family.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
                if sample.name == _FINISHED and sample.labels.get("finished_reason") not in _UNFINISHED_REASONS:
                    answered += sample.value
    except ValueError as error:
        raise HyperqwenError(f"/metrics is not in Prometheus' format: {error}") from None
    missing = [name for name in _NEEDED if name not in values]
    if missing:
        raise HyperqwenError(
            f"/metrics has no {', '.join(missing)}", "take --disable-log-stats out of engine.arguments"
        )
    requests = values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
    moving = tuple(values.get(name, 0.0) for name in _MOVING)
    return Counters(moving, round(max(requests, values.get(UNANSWERED, 0.0))), round(answered))


class Watchdog:
    """Gives signs of life while the engine works or has nothing to do, and none while it hangs.

    It hangs when requests are in flight and nothing moves for `first_stall` seconds, or for `stall` seconds once the
    engine has answered a request since the first look. The launcher's own question is before that look. A server that
    does not even say what it counts hangs after `stall` seconds, whatever it has answered.
    """

    def __init__(
        self,
        notifier: Notifier,
        metrics: Callable[[], str],
        say: Callable[[str], None],
        dump: Callable[[], object],
        *,
        stall: float = STALL_SECONDS,
        first_stall: float = FIRST_STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            metrics: asks the server for /metrics; raises HyperqwenError where it does not answer.
            say: tells the user.
            dump: lets the engine write down where it is, for whoever asks why it hung.
            stall: seconds without progress after which it counts as hung.
            first_stall: the same until a request has been answered.
        """
        self._notifier = notifier
        self._metrics = metrics
        self._say = say
        self._dump = dump
        self._stall = stall
        self._first_stall = first_stall
        self._clock = clock
        self._interval = (notifier.watchdog or 0) / 3
        self._next = 0.0
        self._moved = self._heard = clock()
        self._first: Counters | None = None
        self._last: Counters | None = None
        self._told = False

    def look(self) -> None:
        """Look if it is time to, and tell the service manager."""
        if not self._interval or self._clock() < self._next:
            return
        try:
            seen: Counters | None = counters(self._metrics())
            said = str(seen)
        except HyperqwenError as error:
            seen, said = None, error.message
        now = self._clock()
        self._next = now + self._interval
        if seen is not None and (seen.requests == 0 or self._last is None or seen.moving != self._last.moving):
            self._moved = now
        if seen is not None:
            self._heard, self._last = now, seen
            self._first = self._first or seen
        warm = self._last is not None and self._first is not None and self._last.answered > self._first.answered
        still = now - self._moved
        if still < (self._stall if warm else self._first_stall) and now - self._heard < self._stall:
            self._notifier.alive()
            self._told = False
        elif not self._told:
            self._told = True
            self._say(
                f"no progress for {still:.0f} s ({said}); the engine writes its stacks to the log, and the watchdog "
                "gets no more signs of life and ends this service"
            )
            self._dump()


class SpillReport:
    """Tells once when the cards' memory seems to have gone to the host's, and again when it is something else."""

    def __init__(
        self,
        cards: Sequence[Gpu],
        held: int,
        again: Callable[[Sequence[Gpu]], Sequence[Gpu]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            cards: as they were before the engine started.
            held: bytes that the engine is to hold of each.
            again: the same cards as they are now; raises HyperqwenError where the driver does not say.
        """
        from hyperqwen.runtime.gpu import SpillWatch

        self._cards = cards
        self._held = held
        self._again = again
        self._clock = clock
        self._watches = [SpillWatch(card) for card in cards]
        self._due = 0.0
        self._told = ""

    def settle(self, held: int | None) -> None:
        """Look right before the server is ready, and from now on, with what the engine says that it holds of each card.

        Raises UnsuitableError where a card has clearly taken in less. Nothing is done where the engine did not say
        (None), nor is one refused whose cards cannot be asked: `look` tells that.
        """
        if held is None:
            return
        self._held = held
        try:
            now = self._again(self._cards)
        except HyperqwenError:
            return
        for watch, card in zip(self._watches, now, strict=True):
            problem = watch.look(card, held)
            if problem is not None:
                raise UnsuitableError(
                    f"{problem.cause}; it would answer, many times slower than it should",
                    "set a smaller memory.kv_cache_bytes or memory.utilization, or free the card in Windows (Task "
                    "Manager shows who has it)",
                )

    def look(self) -> str | None:
        """What is new, if it is time to look and something is."""
        if self._clock() < self._due:
            return None
        self._due = self._clock() + SPILL_SECONDS
        try:
            now = self._again(self._cards)
        except HyperqwenError as error:
            said = f"the cards' memory cannot be watched: {error.message}"
        else:
            found = [watch.look(card, self._held) for watch, card in zip(self._watches, now, strict=True)]
            said = "; ".join(f"{problem.cause}; {problem.fix}" for problem in found if problem is not None)
        new = said if said != self._told else None
        self._told = said
        return new or None
