from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.engine.embedding import (
    EmbeddingScheme,
    parse_scheme,
    shared_token_embedding_method,
    token_embedding_method,
)

NAME = "model.embed_tokens"
WEIGHTS: dict[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
    "dynamic": False,
    "actorder": None,
}
SCHEME: dict[str, Any] = {"input_activations": None, "output_activations": None, "format": "pack-quantized"}


def scheme(weights: dict[str, Any] | None = None, **rest: Any) -> dict[str, Any]:
    return {**SCHEME, "weights": SimpleNamespace(**{**WEIGHTS, **(weights or {})}), **rest}


def test_the_27b_embedding() -> None:
    parsed = parse_scheme(NAME, scheme(), 5120)

    assert parsed == EmbeddingScheme(bits=8, group_size=128)
    assert parsed.packed_width(5120) == 1280, "four 8-bit codes a word"
    assert parsed.groups(5120) == 40


def test_four_bits() -> None:
    parsed = parse_scheme(NAME, scheme({"num_bits": 4}), 5120)

    assert (parsed.packed_width(5120), parsed.groups(5120)) == (640, 40)


@pytest.mark.parametrize(
    ("weights", "rest", "hidden", "message"),
    [
        ({"num_bits": 6}, {}, 128, "num_bits is 6, not 4 or 8"),
        ({"type": "float"}, {}, 128, "type is 'float', not 'int'"),
        ({"symmetric": False}, {}, 128, "symmetric is False, not True"),
        ({"strategy": "channel"}, {}, 128, "strategy is 'channel', not 'group'"),
        ({"dynamic": True}, {}, 128, "dynamic is True, not False"),
        ({"actorder": "static"}, {}, 128, "actorder is 'static', not None"),
        ({"group_size": None}, {}, 128, "group_size is None, not a divisor of hidden_size 128"),
        ({"group_size": 0}, {}, 128, "group_size is 0, not a divisor of hidden_size 128"),
        ({"group_size": -1}, {}, 128, "group_size is -1, not a divisor of hidden_size 128"),
        ({"group_size": 96}, {}, 128, "group_size is 96, not a divisor of hidden_size 128"),
        ({"group_size": 3}, {}, 6, "hidden_size is 6, not a multiple of 4"),
        ({"num_bits": 4, "group_size": 4}, {}, 12, "hidden_size is 12, not a multiple of 8"),
        ({}, {"format": "int-quantized"}, 128, "format is 'int-quantized', not 'pack-quantized'"),
        ({}, {"format": None}, 128, "format is None, not 'pack-quantized'"),
        ({}, {"input_activations": "int8"}, 128, "input_activations is 'int8', not None"),
        ({}, {"output_activations": "int8"}, 128, "output_activations is 'int8', not None"),
    ],
)
def test_a_scheme_that_is_not_served(weights: dict[str, Any], rest: dict[str, Any], hidden: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_scheme(NAME, scheme(weights, **rest), hidden)

    assert str(caught.value).startswith(
        f"{NAME}: cannot serve this quantized token embedding: {message}. Quantize it with"
    ), f"one difference, one complaint: {caught.value}"


def test_all_differences_are_told_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        parse_scheme(NAME, scheme({"num_bits": 3, "symmetric": False, "group_size": 7}), 128)

    for part in ("num_bits is 3", "symmetric is False", "group_size is 7"):
        assert part in str(caught.value)


@given(
    bits=st.sampled_from([4, 8]),
    group_size=st.integers(1, 300),
    groups=st.integers(1, 60),
)
def test_words_and_scales_hold_exactly_one_row(bits: int, group_size: int, groups: int) -> None:
    hidden = group_size * groups
    wanted = scheme({"num_bits": bits, "group_size": group_size})
    if hidden * bits % 32:
        with pytest.raises(ValueError, match="hidden_size"):
            parse_scheme(NAME, wanted, hidden)
        return
    parsed = parse_scheme(NAME, wanted, hidden)

    assert parsed.packed_width(hidden) * (32 // bits) == hidden
    assert parsed.groups(hidden) * group_size == hidden


@pytest.mark.parametrize("quant_config", [None, SimpleNamespace(get_name=lambda: "fp8")])
def test_other_checkpoints_keep_vllm_s_embedding(quant_config: Any) -> None:
    config = SimpleNamespace(
        quant_config=quant_config,
        model_config=SimpleNamespace(
            hf_text_config=SimpleNamespace(hidden_size=128, tie_word_embeddings=True, mtp_use_dedicated_embeddings=True)
        ),
    )

    assert token_embedding_method(config, NAME) is None
    assert shared_token_embedding_method(config) is None


def test_importing_the_seam_needs_neither_torch_nor_vllm() -> None:
    """vLLM inspects model classes in a subprocess; what the seam imports is paid by every start."""
    code = "import sys; sys.modules.update(torch=None, vllm=None); import hyperqwen.engine.embedding"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
