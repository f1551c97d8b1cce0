from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from hyperqwen.engine import progress
from hyperqwen.runtime import watchdog


def values(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_step_counts_whether_or_not_it_gave_tokens() -> None:
    registry = CollectorRegistry()
    make = progress.step_logger(registry)
    first, second = make(None, 0), make(None, 1)
    first.record(object(), None, mm_cache_stats=None, engine_idx=0)
    second.record(object(), object())
    # What the engine sends between steps, such as an answer to a question of the server's, is no step.
    first.record(None, None)
    for logger in (first, second):
        logger.log_engine_initialized()
        logger.log()
        logger.record_sleep_state(1, 0)
    assert values(registry)[watchdog.STEPS] == 2


def test_requests_without_an_answer_are_asked_for_when_somebody_looks() -> None:
    registry = CollectorRegistry()
    waiting = 3
    progress.count_unanswered(lambda: waiting, registry)
    assert values(registry)[watchdog.UNANSWERED] == 3
    waiting = 0
    assert values(registry)[watchdog.UNANSWERED] == 0
