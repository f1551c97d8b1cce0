"""Patch 0007: a drafter's few layers do not set the size of the model's KV groups.

Runs in the engine's environment, on vLLM's own specs of the 27B model and its DFlash2 drafter.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    get_kv_cache_capacity,
    get_kv_cache_config_from_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from hyperqwen.engine.kv_groups import group_size

BLOCK = 448  # the tokens whose keys and values fill as much as one state with k = 7
PAGE = BLOCK * 4096
POOL = 5_583_457_484
CONTEXT = 65_536

# 4 heads of 256, and 8 heads of 128: both take 4096 bytes a token and layer.
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, sliding_window=2048)
STATE = MambaSpec(
    block_size=BLOCK,
    # The convolution's columns (3, and one a draft token) and the recurrent state.
    shapes=((10240, 3 + 7), (48, 128, 128)),
    dtypes=(torch.bfloat16, torch.float16),
    page_size_padded=PAGE,
    num_speculative_blocks=7,
)


def layers(**counts: tuple[int, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    return {f"{name}.{index}": spec for name, (count, spec) in counts.items() for index in range(count)}


def config(mode: str) -> Any:
    """What vLLM reads of its configuration to size a pool: profile B's values."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=CONTEXT),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, tensor_parallel_size=1
        ),
        # Two batches of 2048 tokens are under way when scheduling is asynchronous.
        max_in_flight_tokens=2 * 2048,
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            mamba_cache_mode=mode,
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
    )


def sizes(groups: list[KVCacheGroupSpec]) -> list[int]:
    return sorted(len(group.layer_names) for group in groups)


def test_the_27b_model_and_its_drafter() -> None:
    specs = layers(full=(16, FULL), state=(48, STATE), draft=(5, WINDOW))
    assert {spec.page_size_bytes for spec in specs.values()} == {PAGE}
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    assert sizes(groups) == [5] + [8] * 8
    (drafter,) = [group for group in groups if isinstance(group.kv_cache_spec, SlidingWindowSpec)]
    assert drafter.layer_names == [f"draft.{index}" for index in range(5)]


@pytest.mark.parametrize(("mode", "tokens"), [("none", 69_758), ("align", 68_605)])
def test_the_published_pools(mode: str, tokens: int) -> None:
    """What the system that this one is built after logged on a 24 GB card, without and with prefix caching."""
    groups = _get_kv_cache_groups_uniform_page_size(layers(full=(16, FULL), state=(48, STATE), draft=(5, WINDOW)))
    pool = get_kv_cache_config_from_groups(config(mode), groups, POOL)
    assert pool.num_blocks == 380
    assert get_kv_cache_capacity(config(mode), pool)[0] == tokens


@pytest.mark.parametrize(
    ("full", "state", "windows"),
    list(itertools.product((1, 3, 4, 16, 17), (12, 48, 51), (1, 2, 3, 5, 8, 9, 16, 20))),
)
def test_the_engine_and_the_planner_agree(full: int, state: int, windows: int) -> None:
    """What vLLM builds is what the function says that stands in for it where there is no vLLM."""
    groups = _get_kv_cache_groups_uniform_page_size(
        layers(full=(full, FULL), state=(state, STATE), draft=(windows, WINDOW))
    )
    size = group_size([full, state, windows], [False, False, True])
    assert len(groups) == sum(-(-count // size) for count in (full, state, windows))
    assert max(sizes(groups)) <= size


def test_windows_of_the_model_itself_are_as_vllm_has_them() -> None:
    """A model of few full and many sliding layers has no drafter's bucket: the full ones set the size."""
    wide = replace(WINDOW, num_kv_heads=4, head_size=256)
    groups = _get_kv_cache_groups_uniform_page_size(layers(full=(4, FULL), window=(20, wide)))
    assert sizes(groups) == [4] * 6
