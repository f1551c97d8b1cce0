from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from hyperqwen.errors import HyperqwenError, UnsuitableError
from hyperqwen.runtime.client import Unreachable
from hyperqwen.runtime.gpu import Gpu, SpillWatch
from hyperqwen.runtime.notify import Notifier
from hyperqwen.runtime.watchdog import SPILL_SECONDS, Counters, SpillReport, Watchdog, counters
from tests.test_runtime_preflight import GPU

# Of a real /metrics of vLLM 0.31.0, with the two lines that hyperqwen.engine.progress adds.
METRICS = """
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="nano"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="nano"} 2.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="nano"} 36.0
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="nano"} 1.7961005119874806e+09
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="nano"} 5.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="nano"} 35.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="nano"} 36.0
vllm:iteration_tokens_total_count{engine="0",model_name="nano"} 36.0
vllm:iteration_tokens_total_sum{engine="0",model_name="nano"} 41.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="stop",model_name="nano"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="nano"} 2.0
vllm:request_success_total{engine="0",finished_reason="abort",model_name="nano"} 5.0
vllm:request_success_total{engine="0",finished_reason="error",model_name="nano"} 1.0
# TYPE hyperqwen:engine_steps_total counter
hyperqwen:engine_steps_total 37.0
# TYPE hyperqwen:unanswered_requests gauge
hyperqwen:unanswered_requests 4.0
"""


def test_what_the_engine_counts() -> None:
    assert counters(METRICS) == Counters((37.0, 41.0, 36.0, 5.0), 4, 9)
    assert counters(METRICS).generated == 36
    assert "4 requests in flight" in str(counters(METRICS)) and "engine_steps_total 37" in str(counters(METRICS))


def test_two_engine_processes_count_together() -> None:
    twice = METRICS + "".join(
        line.replace('engine="0"', 'engine="1"') + "\n" for line in METRICS.splitlines() if 'engine="0"' in line
    )
    assert counters(twice).generated == 72 and counters(twice).requests == 6


def test_the_servers_own_count_shows_what_a_hung_engine_does_not() -> None:
    hung = METRICS.replace('running{engine="0",model_name="nano"} 1.0', 'running{engine="0",model_name="nano"} 0.0')
    hung = hung.replace('waiting{engine="0",model_name="nano"} 2.0', 'waiting{engine="0",model_name="nano"} 0.0')
    assert counters(hung).requests == 4


@pytest.mark.parametrize("text", ["", "process_cpu_seconds_total 1.0\n", "vllm:generation_tokens_total 1.0\n"])
def test_an_engine_without_counters_says_what_to_take_out(text: str) -> None:
    with pytest.raises(HyperqwenError, match="vllm:num_requests_running") as raised:
        counters(text)
    assert "--disable-log-stats" in str(raised.value)


def test_what_is_no_metrics() -> None:
    with pytest.raises(HyperqwenError, match="Prometheus"):
        counters("<html>{not metrics}</html>")


class Scene:
    """A watchdog of 30 s with a clock and an engine that the test moves, on a real socket."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.engine: Counters | Exception = Counters((1.0, 1.0, 1.0, 1.0), 0)
        self.said: list[str] = []
        self.dumps = 0
        address = f"hyperqwen-watchdog-{os.getpid()}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(f"\0{address}")
        self._socket.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": f"@{address}", "WATCHDOG_USEC": "30000000"})
        self.dog = Watchdog(
            notifier, self._metrics, self.said.append, self._dump, stall=60, first_stall=300, clock=lambda: self.now
        )

    def _dump(self) -> None:
        self.dumps += 1

    def _metrics(self) -> str:
        if isinstance(self.engine, Exception):
            raise self.engine
        steps, _, tokens, prompt = self.engine.moving
        return (
            f"vllm:num_requests_running {self.engine.requests}\nvllm:num_requests_waiting 0\n"
            f"hyperqwen:engine_steps_total {steps}\nvllm:generation_tokens_total {tokens}\n"
            f"vllm:prompt_tokens_total {prompt}\n"
            f'vllm:request_success_total{{finished_reason="stop"}} {self.engine.answered}\n'
        )

    def after(self, seconds: float) -> int:
        """Signs of life in the next `seconds`, looked at twice a second."""
        signs = 0
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            self.dog.look()
            try:
                while True:
                    signs += self._socket.recv(100) == b"WATCHDOG=1"
            except BlockingIOError:
                continue
        return signs

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    made.close()


def test_an_idle_engine_is_healthy_three_times_in_each_interval(scene: Scene) -> None:
    assert scene.after(300) == 30 and not scene.said


def test_a_working_one_is_healthy_even_in_a_long_prefill(scene: Scene) -> None:
    for step in range(20):
        scene.engine = Counters((float(step), 1.0, 1.0, 1.0), 3)
        assert scene.after(30) == 3, f"at step {step}"


def test_one_that_hangs_gets_no_more_signs_and_says_so_once(scene: Scene) -> None:
    assert scene.after(30) == 3
    scene.engine = Counters((5.0, 1.0, 1.0, 1.0), 2, answered=1)
    assert scene.after(60) == 6, "within the time that a kernel's compilation may take"
    assert scene.after(300) <= 1, "signs of life of an engine that hangs"
    assert len(scene.said) == 1 and "2 requests in flight" in scene.said[0] and "no progress for" in scene.said[0]
    assert scene.dumps == 1

    scene.engine = Counters((6.0, 1.0, 1.0, 1.0), 2, answered=1)
    assert scene.after(30) == 3, "it moves again"


def test_until_a_request_is_answered_kernels_may_be_built(scene: Scene) -> None:
    assert scene.after(30) == 3
    scene.engine = Counters((5.0, 1.0, 1.0, 1.0), 2)
    assert scene.after(280) >= 27 and not scene.said
    assert scene.after(300) <= 3, "signs of life of an engine that hangs in its first request"
    assert len(scene.said) == 1 and scene.dumps == 1


def test_one_look_without_an_answer_ends_nothing(scene: Scene) -> None:
    assert scene.after(30) == 3
    scene.engine = Counters((5.0, 1.0, 1.0, 1.0), 2)
    scene.after(200)
    scene.engine = Unreachable("no answer from http://127.0.0.1/metrics: timed out")
    assert scene.after(30) == 3 and not scene.said


def test_what_answered_before_the_first_look_does_not_count(scene: Scene) -> None:
    scene.engine = Counters((5.0, 1.0, 1.0, 1.0), 2, answered=1)
    assert scene.after(200) == 20, "the launcher's own question has built no kernel of a long prompt"


def test_a_server_that_does_not_answer_is_not_healthy(scene: Scene) -> None:
    assert scene.after(30) == 3
    scene.engine = Unreachable("no answer from http://127.0.0.1/metrics: timed out")
    assert scene.after(60) <= 6
    assert scene.after(300) == 0
    assert "timed out" in scene.said[0]


def test_without_a_watchdog_nothing_is_asked() -> None:
    def asked() -> str:
        raise AssertionError("the server was asked")

    dog = Watchdog(Notifier({}), asked, lambda _: None, lambda: None)
    dog.look()


def test_a_spill_is_told_once_and_a_driver_that_does_not_answer_stops_nothing() -> None:
    now, looks = 1000.0, 0
    held = 20 << 30
    answer: Gpu | Exception = replace(GPU, used=GPU.used + held)

    def again(cards: Sequence[Gpu]) -> list[Gpu]:
        nonlocal looks
        assert list(cards) == [GPU]
        looks += 1
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    spill = SpillReport([GPU], held, again, clock=lambda: now)
    assert spill.look() is None and spill.look() is None and looks == 1, "asked more often than it is time to"

    def later() -> str | None:
        nonlocal now
        now += SPILL_SECONDS
        return spill.look()

    answer = replace(GPU, used=GPU.used + held // 2)
    said = later()
    assert said is not None and "shared memory of Windows" in said
    assert later() is None, "told a second time"
    answer = UnsuitableError("the NVIDIA driver does not answer")
    assert "cannot be watched: the NVIDIA driver does not answer" in str(later())
    answer = replace(GPU, used=GPU.used + held)
    assert later() is None


def test_a_server_that_is_spilled_from_the_start_is_refused() -> None:
    planned, held = 22 << 30, 20 << 30
    answer: Gpu | Exception = replace(GPU, used=GPU.used + held)

    def again(_cards: Sequence[Gpu]) -> list[Gpu]:
        if isinstance(answer, Exception):
            raise answer
        return [answer]

    now = 1000.0
    spill = SpillReport([GPU], planned, again, clock=lambda: now)
    spill.settle(held)
    assert spill.look() is None, "compared with what was planned, which the engine did not take"

    answer = replace(GPU, used=GPU.used + held - SpillWatch.TOLERANCE)
    spill.settle(held)
    answer = replace(GPU, used=GPU.used + held - SpillWatch.TOLERANCE - 1)
    with pytest.raises(UnsuitableError, match="shared memory of Windows") as raised:
        spill.settle(held)
    assert raised.value.fix is not None and "a smaller memory.kv_cache_bytes or memory.utilization" in raised.value.fix

    spill.settle(None)
    answer = UnsuitableError("the NVIDIA driver does not answer")
    spill.settle(held)
    assert "cannot be watched" in str(SpillReport([GPU], held, again).look())
