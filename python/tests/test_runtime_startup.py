from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.runtime.startup import Event, events

# As vLLM 0.31.0 prints them. That its source still has the words is checks/engine/test_log_messages.py's to see.
LINES = [
    (
        "Loading safetensors checkpoint shards:  38% Completed | 3/8 [00:04<00:07,  1.41s/it]",
        Event("weights", "loading weights: 3 of 8 shards"),
    ),
    (
        "Multi-thread loading shards: 100% Completed | 8/8 [00:04<00:00,  1.41s/it]",
        Event("weights", "loading weights: 8 of 8 shards"),
    ),
    (
        "(EngineCore pid=1) INFO 12-01 04:28:52 [default_loader.py:484] Loading weights took 0.04 seconds",
        Event("weights", "weights read in 0.0 s", final=True),
    ),
    (
        "(EngineCore pid=1) INFO [model_runner.py:408] Model loading took 14.2645 GiB memory and 20.40 seconds",
        Event("weights", "weights: 14.26 GiB in 20 s", final=True),
    ),
    ("[backends.py:1152] Dynamo bytecode transform time: 4.12 s", Event("compile", "compiling the model")),
    (
        "[backends.py:392] Compiling a graph for compile range (1, 2048) takes 33.21 s",
        Event("compile", "compiling the model: a part took 33 s"),
    ),
    ("[monitor.py:58] torch.compile took 41.77 s in total", Event("compile", "compiled in 42 s", final=True)),
    (
        "[gpu_worker.py:693] Available KV cache memory: 5.2 GiB",
        Event("pool", "memory of the pool: 5.20 GiB", final=True),
    ),
    (
        "INFO GPU KV cache size: 69,758 tokens, Maximum concurrency for 65,536 tokens per request: 1.06x",
        Event("pool", "pool: 69,758 tokens, 1.06 requests of 65,536", final=True),
    ),
    (
        "Capturing CUDA graphs (decode, FULL):  60%|######    | 3/5 [00:01<00:00,  2.9it/s]",
        Event("graphs", "capturing CUDA graphs: 3 of 5"),
    ),
    (
        "Capturing dflash2 CUDA graphs (FULL): 100%|##########| 8/8 [00:01<00:00,  6.1it/s]",
        Event("graphs", "capturing CUDA graphs: 8 of 8"),
    ),
    (
        "[gpu_model_runner.py:6855] Graph capturing finished in 7 secs, took 1.32 GiB",
        Event("graphs", "CUDA graphs: 1.32 GiB in 7 s", final=True),
    ),
    (
        "init engine (profile, create kv cache, warmup model) took 61.20 s (compilation: 41.77 s)",
        Event("warm", "engine set up in 61 s", final=True),
    ),
]


@pytest.mark.parametrize(("line", "event"), LINES)
def test_a_line_of_the_log(line: str, event: Event) -> None:
    assert list(events(line + "\n")) == [event]


def test_a_bar_that_is_drawn_over_itself_is_many_events() -> None:
    bar = "\r".join(
        f"Loading safetensors checkpoint shards: {n * 25:3}% Completed | {n}/4 [00:00<00:00]" for n in range(5)
    )
    assert [event.text for event in events(bar)] == [f"loading weights: {n} of 4 shards" for n in range(5)]


def test_they_come_in_the_order_of_the_log() -> None:
    assert list(events("\n".join(line for line, _ in LINES))) == [event for _, event in LINES]


@given(st.text())
def test_what_is_not_known_is_no_event_and_no_error(text: str) -> None:
    assert list(events(f"INFO [model.py:699] {text}")) == []
