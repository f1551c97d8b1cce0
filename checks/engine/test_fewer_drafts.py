"""Patch 0010: a step with fewer drafts than the one before keeps the convolution's history, and the engine.

Runs in the engine's environment; HYPERQWEN_NANO names the model. nano's answers do not depend on that history, so the
first test compares the convolution with one over the whole accepted text.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lossless.generate import expected, generate
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

NANO = Path(os.environ["HYPERQWEN_NANO"])
CHANNELS, WIDTH, DRAFTS = 128, 4, 3
HISTORY = WIDTH - 1
LENGTH = 64


def layer_of(weight: torch.Tensor) -> SimpleNamespace:
    """What `_spec_forward` reads of a layer; where a kernel is used, its weight is packed when it is loaded."""
    native = torch.cpu._is_amx_tile_supported()
    conv1d = SimpleNamespace(
        weight=gdn_attention.ops.causal_conv1d_weight_pack(weight) if native else weight,
        bias=None,
        _cpu_unpacked_conv_weight=weight,
    )
    return SimpleNamespace(
        conv1d=conv1d, activation="silu", A_log=None, dt_bias=None, rearrange_mixed_qkv=lambda rows: (rows[None],) * 3
    )


@pytest.mark.parametrize("dim_first", [False, True], ids=["state-first", "dim-first"])
@pytest.mark.parametrize("requests", [1, 2, 3])
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "ragged"])
def test_the_history_is_the_accepted_text(
    monkeypatch: pytest.MonkeyPatch, requests: int, uniform: bool, dim_first: bool
) -> None:
    """Steps of 1 to 4 tokens of which 1 to all are accepted: every row is that of the text convolved at once."""
    monkeypatch.setattr(gdn_attention, "is_conv_state_dim_first", lambda: dim_first)
    # The recurrence that follows is not this test's: what goes into it is what is compared.
    monkeypatch.setattr(
        gdn_attention.ops, "fused_sigmoid_gating_delta_rule_update_spec_cpu", lambda **arguments: arguments["v"]
    )
    generator = torch.Generator().manual_seed(20261201)
    choice = random.Random(20261201)
    weight = torch.randn(CHANNELS, WIDTH, generator=generator).bfloat16()
    layer = layer_of(weight)
    states = torch.randn(requests + 1, HISTORY + DRAFTS, CHANNELS, generator=generator).bfloat16().transpose(1, 2)
    states = states.contiguous() if dim_first else states
    slots = torch.arange(1, requests + 1, dtype=torch.int32)[:, None].expand(requests, DRAFTS + 1)
    texts = [states[slot, :, :HISTORY].T.clone() for slot in range(1, requests + 1)]
    accepted = [1] * requests

    for _ in range(40):
        lengths = [choice.randint(1, DRAFTS + 1) for _ in range(requests)]
        lengths = lengths[:1] * requests if uniform else lengths
        rows = [torch.randn(length, CHANNELS, generator=generator).bfloat16() for length in lengths]
        found = gdn_attention._spec_forward(
            layer,
            SimpleNamespace(
                num_spec_decodes=requests,
                spec_state_indices_tensor=slots,
                spec_query_start_loc=torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32),
                num_accepted_tokens=torch.tensor(accepted, dtype=torch.int32),
            ),
            torch.cat(rows),
            None,
            None,
            states,
            None,
            WIDTH,
            HISTORY + DRAFTS,
        )
        right = [convolved(torch.cat([text, new]), weight)[-len(new) :] for text, new in zip(texts, rows, strict=True)]
        torch.testing.assert_close(found, torch.cat(right), rtol=0.02, atol=0.02)
        accepted = [choice.randint(1, length) for length in lengths]
        texts = [torch.cat([text, new[:kept]]) for text, new, kept in zip(texts, rows, accepted, strict=True)]


def convolved(text: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The rows [tokens, CHANNELS] of a text that starts with nothing before it."""
    ends = torch.tensor([0, len(text)], dtype=torch.int32)
    return causal_conv1d_fn_cpu(text.T, weight, None, torch.zeros(1, CHANNELS, HISTORY).bfloat16(), ends).T


def test_a_request_reaches_the_model_s_length(tmp_path: Path) -> None:
    """The last steps before max_model_len have room for fewer drafts than were just accepted."""
    table = json.loads((NANO / "nano.json").read_text())
    cycles = [cycle["ids"] for cycle in table["cycles"] if len(cycle["ids"]) > 8]
    prompts = [(cycle * LENGTH)[:length] for cycle in cycles[:2] for length in range(LENGTH - 14, LENGTH - 4)]
    arguments = {
        "max_model_len": LENGTH,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
    }
    answers = generate(NANO, tmp_path / "answers.json", arguments, prompts, LENGTH)
    assert answers["tokens"] == [expected(table["next"], prompt, LENGTH - len(prompt)) for prompt in prompts]
