"""Two counters on /metrics that tell work from a hang: the scheduler's steps, and requests without an answer.

vLLM's token counters stand still through a long prefill, and its gauges of running requests are what the engine last
said, which an engine that hangs does not correct. `hyperqwen.runtime.watchdog` reads these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

STEPS = "hyperqwen:engine_steps"
UNANSWERED = "hyperqwen:unanswered_requests"


class StepLogger:
    """A stat logger of vLLM's (StatLoggerBase) that counts the steps of which the scheduler tells."""

    def __init__(self, steps: Counter) -> None:
        self._steps = steps

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        del iteration_stats, mm_cache_stats, engine_idx
        if scheduler_stats is not None:
            self._steps.inc()

    def log(self) -> None:
        """Nothing: the counter is read from /metrics."""

    def log_engine_initialized(self) -> None:
        """Nothing."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Nothing."""
        del is_awake, level


def step_logger(registry: CollectorRegistry = REGISTRY) -> Callable[[Any, int], StepLogger]:
    """The factory that vLLM asks for: one counter for all engine processes."""
    steps = Counter(STEPS, "Steps that the engine's scheduler has finished.", registry=registry)
    return lambda _config, _engine_index: StepLogger(steps)


def count_unanswered(unfinished: Callable[[], int], registry: CollectorRegistry = REGISTRY) -> None:
    """Expose `unfinished()`: requests that the server has taken and not yet answered to the end."""
    gauge = Gauge(UNANSWERED, "Requests taken and not answered to the end, as the server counts.", registry=registry)
    gauge.set_function(unfinished)
