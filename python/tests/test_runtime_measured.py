from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.engine import messages
from hyperqwen.errors import MissingError, UnsuitableError
from hyperqwen.prepare import geometry
from hyperqwen.profiles.memory import GIB, Budget, Load, budget
from hyperqwen.runtime import measured
from hyperqwen.runtime.measured import Measured, side_by_side

CORE = "(EngineCore pid=4379) INFO 12-01 05:03:19 "
WORKER = "(Worker_TP{rank} pid=31337) INFO 12-01 05:03:19 [gpu_worker.py:692] "
# As vLLM 0.31.0 writes them; checks/engine/test_log_messages.py looks the words up in its source.
START = f"{CORE}[core.py:129] Initializing a V1 LLM engine (v0.31.0) with config: model='x', dtype=torch.bfloat16\n"
LOADED = f"{CORE}[gpu_model_runner.py:5355] Model loading took 13.86 GiB memory and 61.250000 seconds\n"
BLOCK = (
    f"{CORE}[interface.py:989] Setting attention block size to 864 tokens to ensure that attention page size is >= "
    "mamba page size.\n"
)
AVAILABLE = WORKER.format(rank=0) + "Available KV cache memory: 6.41 GiB\n"
PLANNED_GRAPHS = WORKER.format(rank=0) + (
    "CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization=0.9300 is "
    "equivalent to --gpu-memory-utilization=0.9155 without CUDA graph memory profiling.\n"
)
CAPACITY = (
    f"{CORE}[kv_cache_utils.py:2464] GPU KV cache size: 83,456 tokens, Maximum concurrency for 65,536 tokens per "
    "request: 1.27x\n"
)
GROUPS = f"{CORE}[kv_cache_utils.py:772] kv cache group sizes [864]\n"
CAPTURED = WORKER.format(rank=0) + "Graph capturing finished in 14 secs, took 0.31 GiB\n"
POOLED = WORKER.format(rank=0) + (
    "CUDA graph pool memory: 0.31 GiB (actual), 0.35 GiB (estimated), difference: 0.04 GiB (12.9%).\n"
)
USAGE = WORKER.format(rank=0) + (
    "Free memory on device (23.12/23.55 GiB) on startup. Desired GPU memory utilization is (0.93, 21.9 GiB). "
    "Actual usage is 14.27 GiB for consumed memory (weights + non-torch), 0.81 GiB for peak activation, and 0.31 GiB "
    "for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=6718888` (6.26 GiB) to fit "
    "into requested memory, or `--kv-cache-memory=7918888` (7.48 GiB) to fully utilize gpu memory. Current kv cache "
    "memory in use is 6.41 GiB.\n"
)
LOG = START + LOADED + BLOCK + AVAILABLE + PLANNED_GRAPHS + CAPACITY + GROUPS + CAPTURED + POOLED + USAGE


def gib(number: float) -> int:
    return round(number * GIB)


def planned(**changes: object) -> Budget:
    load = Load(geometry=geometry.load("qwen3.8-27b"), drafter="mtp", draft_tokens=3, card_bytes=gib(23.55))
    return budget(replace(load, **changes))  # type: ignore[arg-type]


def test_a_start_on_a_card() -> None:
    assert measured.measured(LOG) == Measured(
        total_bytes=gib(23.55),
        free_bytes=gib(23.12),
        requested_bytes=gib(21.9),
        weights_bytes=gib(13.86),
        consumed_bytes=gib(14.27),
        peak_bytes=gib(0.81),
        graphs_bytes=gib(0.31),
        graphs_estimate_bytes=gib(0.35),
        pool_bytes=gib(6.41),
        pool_tokens=83_456,
        context_tokens=65_536,
        concurrency=1.27,
        block_tokens=864,
        group_tokens=(864,),
    )


def test_activations_are_the_peak_without_the_graphs_that_were_planned_into_it() -> None:
    assert measured.measured(LOG).activations_bytes == gib(0.81) - gib(0.35)
    off = (
        WORKER.format(rank=0)
        + "CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0).\n"
    )
    assert measured.measured(LOG.replace(PLANNED_GRAPHS, off)).activations_bytes == gib(0.81)
    assert Measured().activations_bytes is None


def test_colours_and_carriage_returns_are_no_part_of_a_message() -> None:
    coloured = LOG.replace("[interface.py:989]", "\x1b[90m[interface.py:989]\x1b[0m").replace("\n", "\r\n")
    coloured = coloured.replace("KV cache memory: 6.41", "KV cache memory: \x1b[32m6.41\x1b[0m")
    assert measured.measured(coloured) == measured.measured(LOG)


def test_of_several_starts_the_last() -> None:
    later = START + LOADED.replace("13.86", "9.5")
    assert measured.measured(LOG + later) == Measured(weights_bytes=gib(9.5))


def test_of_several_cards_the_fullest() -> None:
    text = START
    for rank, pool, weights, graphs in ((0, "6.41", "7.01", 0.3), (1, "6.22", "7.13", 0.2)):
        place = WORKER.format(rank=rank)
        text += f"{place}Model loading took {weights} GiB memory and 12.000001 seconds\n"
        text += f"{place}Available KV cache memory: {pool} GiB\n"
        text += f"{place}Graph capturing finished in 3 secs, took {graphs:.2f} GiB\n"
    seen = measured.measured(text)
    assert (seen.pool_bytes, seen.weights_bytes, seen.graphs_bytes) == (gib(6.22), gib(7.13), gib(0.3))


def test_a_pool_whose_size_was_set() -> None:
    text = f"{CORE}[gpu_worker.py:602] Initial free memory 22.9 GiB, reserved 1.44 GiB memory for KV Cache as " + (
        "specified by kv_cache_memory_bytes config and skipped memory profiling.\n"
    )
    assert measured.measured(text) == Measured(free_bytes=gib(22.9), pool_bytes=gib(1.44))


def test_what_the_engine_holds_of_a_card() -> None:
    assert measured.measured(LOG).held_bytes == gib(13.86) + gib(6.41) + gib(0.31)
    assert measured.measured(START + LOADED + AVAILABLE).held_bytes == gib(13.86) + gib(6.41), "without graphs"
    assert measured.measured(START + LOADED).held_bytes is None
    assert measured.measured(START + AVAILABLE).held_bytes is None


def test_a_log_that_is_read_as_it_comes() -> None:
    seen = Measured()
    for line in LOG.splitlines(keepends=True):
        seen = measured.measured(line, seen)
    assert seen == measured.measured(LOG)
    assert measured.measured(START, seen).empty, "another start"


def test_a_processors_log() -> None:
    """Recorded: nano on vLLM 0.31.0's CPU backend."""
    seen = measured.measured(
        f"{CORE}[cpu_worker.py:260] Explicitly set (0.12/23.54) GiB for KV cache on node 0.\n"
        f"{CORE}[kv_cache_utils.py:2464] CPU KV cache size: 149,796 tokens, "
        "Maximum concurrency for 2,048 tokens per request: 73.14x\n"
    )
    assert (seen.pool_tokens, seen.context_tokens, seen.concurrency) == (149_796, 2048, 73.14)
    assert seen.total_bytes == gib(23.54)


def test_what_says_nothing_of_memory() -> None:
    for text in ("", "INFO: Started server process [4165]\n", "Available KV cache memory: nothing GiB\n", "\x00\xff"):
        assert measured.measured(text).empty
    assert not measured.measured(AVAILABLE).empty


@given(st.floats(-99, 999).map(lambda value: round(value, 2)), st.sampled_from([m for m in messages.MEMORY if m.names]))
def test_every_value_of_every_message_is_read(number: float, message: messages.Message) -> None:
    pieces = messages._PLACE.split(message.text)
    line = "".join(piece + str(number) for piece in pieces[:-1]) + pieces[-1]
    said = messages.values(message, f"INFO 12-01 05:03:19 [x.py:1] {line} and more")
    assert said is not None
    assert dict(said) == dict.fromkeys([name for name in message.names if name], str(number))


def test_names_are_those_of_the_figures() -> None:
    named = {name for message in messages.MEMORY for name in message.names if name}
    assert named <= set(Measured().report())


def test_a_message_has_a_name_for_each_value() -> None:
    with pytest.raises(ValueError, match="2 values, and 1 names"):
        messages.pattern(messages.Message("x.py", "%s of %d", ("a",)))


def test_side_by_side() -> None:
    plan = planned()
    rows = {(row.what, row.unit): row for row in side_by_side(plan, measured.measured(LOG))}

    weights = rows["Weights", "bytes"]
    assert weights.predicted == sum(figure.bytes for figure in plan.figures if figure.key.startswith("weights."))
    assert weights.measured == gib(13.86) and weights.ratio == pytest.approx(gib(13.86) / weights.predicted)
    assert rows["Tables and buffers beside them", "bytes"].measured == gib(14.27) - gib(13.86)
    both = rows["Both together", "bytes"]
    assert both.measured == gib(14.27) - gib(13.86) + gib(0.81) - gib(0.35)
    assert both.predicted == plan.figure("overhead").bytes + plan.figure("activations").bytes
    assert rows["Attention block", "tokens"].predicted == plan.pool.block_tokens
    assert rows["KV cache pool", "tokens"].measured == 83_456
    taken = rows["Taken before the start: CUDA's context, other programs", "bytes"]
    assert (taken.predicted, taken.measured, taken.ratio) == (None, gib(23.55) - gib(23.12), None)


def test_only_what_was_measured_has_a_row() -> None:
    assert side_by_side(planned(), Measured()) == ()
    assert [row.what for row in side_by_side(planned(), Measured(pool_bytes=1))] == ["KV cache pool"]


def test_a_plan_that_the_engine_kept_to_has_ratios_of_one() -> None:
    plan = planned()
    weights = sum(figure.bytes for figure in plan.figures if figure.key.startswith("weights."))
    seen = Measured(
        total_bytes=plan.load.card_bytes,
        requested_bytes=plan.requested_bytes,
        weights_bytes=weights,
        consumed_bytes=weights + plan.figure("overhead").bytes,
        peak_bytes=plan.figure("activations").bytes,
        graphs_bytes=plan.figure("graphs").bytes,
        pool_bytes=plan.kv_cache_bytes,
        pool_tokens=plan.pool_tokens,
        concurrency=plan.concurrency,
        block_tokens=plan.pool.block_tokens,
        group_tokens=tuple(group.block_tokens for group in plan.pool.groups),
    )
    ratios = [row.ratio for row in side_by_side(plan, seen)]
    assert len(ratios) == 12 and ratios == pytest.approx([1.0] * 12, rel=0.01)


@pytest.mark.parametrize(
    ("block", "groups", "found"),
    [
        (864, (864, 864), 864),
        (432, (864, 2592), 864),
        (432, (100,), 432),
        (432, None, 432),
        (None, (432,), None),
    ],
)
def test_the_attention_block_after_pages_were_made_equal(
    block: int | None, groups: tuple[int, ...] | None, found: int | None
) -> None:
    assert Measured(block_tokens=block, group_tokens=groups).attention_block_tokens == found


def test_the_table() -> None:
    rows = side_by_side(planned(), replace(measured.measured(LOG), group_tokens=None))
    lines = measured.lines(rows)
    assert lines[0].split() == ["planned", "measured"]
    weights = next(line for line in lines if line.startswith("Weights"))
    assert f"{13.86 * 1024:,.0f} MiB" in weights and weights.endswith("%")
    before = next(line for line in lines if line.startswith("Taken before"))
    assert " - " in before and not before.endswith("%")
    assert any(line.startswith("Requests of the full context") and "1.27 requests" in line for line in lines)


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="does not exist"):
        measured.read(tmp_path / "none.log")
    with pytest.raises(UnsuitableError, match="cannot be read"):
        measured.read(tmp_path)
    (tmp_path / "a.log").write_bytes(LOG.encode() + b"\xff\xfe\n")
    assert measured.read(tmp_path / "a.log") == measured.measured(LOG)
