"""Patch 0009: a prompt of one token, or a last chunk of one, can be computed alone.

Runs in the engine's environment; HYPERQWEN_NANO names the model. A processor without AVX512-BF16 has no such kernel and
takes another way: there a stand-in refuses what the kernel refuses, so that the first test means the same everywhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lossless.generate import expected, generate
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

NANO = Path(os.environ["HYPERQWEN_NANO"])
TOKENS = 12
SLOTS, CHANNELS, WIDTH = 3, 128, 4
BEHIND = 64  # what the projection holds behind the convolution's channels


def standing_in(x: torch.Tensor, silu_activation: bool, is_vnni: bool, **arguments: Any) -> torch.Tensor:
    """The kernel's check and torch's convolution."""
    if x.stride() != (1, x.size(0)):
        raise RuntimeError(f"expect x to be transposed, strides {x.stride()} of {tuple(x.shape)}")
    return causal_conv1d_fn_cpu(x, activation="silu" if silu_activation else None, **arguments)


@pytest.mark.parametrize("dim_first", [False, True], ids=["state-first", "dim-first"])
@pytest.mark.parametrize("known", [False, True], ids=["fresh", "resumed"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_the_convolution_is_torch_s(monkeypatch: pytest.MonkeyPatch, tokens: int, known: bool, dim_first: bool) -> None:
    """The layer's tokens [tokens, CHANNELS] are the front of wider rows, made contiguous; both layouts of the state."""
    generator = torch.Generator().manual_seed(20261201)
    rows = torch.randn(tokens, CHANNELS + BEHIND, generator=generator).bfloat16()
    weight = torch.randn(CHANNELS, WIDTH, generator=generator).bfloat16()
    states = torch.randn(SLOTS, WIDTH - 1, CHANNELS, generator=generator).bfloat16().transpose(1, 2)
    states = states.contiguous() if dim_first else states
    arguments: dict[str, Any] = {
        "x": rows[:, :CHANNELS].contiguous().transpose(0, 1),
        "bias": None,
        "query_start_loc": torch.tensor([0, tokens], dtype=torch.int32),
        "cache_indices": torch.tensor([1], dtype=torch.int32),
        "has_initial_state": torch.tensor([known]),
    }
    right_states = states.clone()
    right = causal_conv1d_fn_cpu(weight=weight, conv_states=right_states, activation="silu", **arguments)

    monkeypatch.setattr(gdn_attention, "is_conv_state_dim_first", lambda: dim_first)
    if torch.cpu._is_avx512_bf16_supported():
        weight = gdn_attention.ops.causal_conv1d_weight_pack(weight)
    else:
        monkeypatch.setattr(gdn_attention.ops, "causal_conv1d_fwd_cpu", standing_in)
    found = gdn_attention._causal_conv1d_fwd_cpu(
        weight=weight, conv_states=states, silu_activation=True, is_vnni=True, **arguments
    )
    torch.testing.assert_close(found, right, rtol=0.02, atol=0.02)
    assert torch.equal(states, right_states)


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_engine_answers(tmp_path: Path, drafts: int) -> None:
    """One request at a time, and chunks of 8 tokens: prompts of 1, and of 9 and 17, whose last chunk is of 1."""
    table = json.loads((NANO / "nano.json").read_text())
    cycle = next(cycle["ids"] for cycle in table["cycles"] if len(cycle["ids"]) > 8) * 3
    prompts = [cycle[:1], cycle[:9], cycle[1:2], cycle[:17]]
    arguments: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 8}
    if drafts:
        arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    answers = generate(NANO, tmp_path / "answers.json", arguments, prompts, TOKENS)
    assert answers["tokens"] == [expected(table["next"], prompt, TOKENS) for prompt in prompts]
