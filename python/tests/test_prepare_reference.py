from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperqwen.errors import VerificationError
from hyperqwen.prepare import nano, reference
from hyperqwen.prepare.reference import Floats, Reference

CONFIG = """
name = "small"
seed = 7
embedding = "bf16"
files = { cycles = "cycles.toml", prompts = "prompts.toml", template = "template.jinja" }
tokenizer = { limit = 512, words = [] }
sampling = { temperature = 0.0 }
construction = { coherence = 0.3, alias_spread = 0.4, layer_noise = 1.0, draft_noise = 1.0 }

[geometry]
hidden_size = 128
intermediate_size = 96
num_hidden_layers = 4
full_attention_interval = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 32
linear_num_key_heads = 1
linear_num_value_heads = 2
linear_key_head_dim = 128
linear_value_head_dim = 128
linear_conv_kernel_dim = 4
max_position_embeddings = 512
"""
CYCLES = """
cycle = [
    { name = "chat", text = "\\n</think>\\n\\nhello there<|im_end|>" },
    { name = "count", text = " one two three four", opening = true },
]
"""


@pytest.fixture(scope="session")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of the same architecture whose layers are as loud as its embeddings."""
    base = tmp_path_factory.mktemp("loud")
    (base / "config.toml").write_text(CONFIG)
    (base / "cycles.toml").write_text(CYCLES)
    (base / "prompts.toml").write_text("completion = []\nchat = []\n")
    (base / "template.jinja").write_text("{{ messages[0].content }}")
    nano.build(nano.load_config(base / "config.toml"), base, base / "model")
    return base / "model"


@pytest.fixture(scope="session")
def model(loud: Path) -> Reference:
    return Reference.load(loud)


IDS = [2, 40, 261, 7, 7, 300, 19, 105, 33, 280, 64, 12]
# (position, token) -> logit, from transformers 5.17.0's Qwen3_5ForCausalLM in float32 on the same files.
LOGITS = {
    (0, 275): 14.6155,
    (0, 278): -0.7743,
    (0, 277): -3.0001,
    (0, 274): -0.9591,
    (1, 275): 12.6399,
    (1, 278): -5.3771,
    (1, 277): -4.179,
    (1, 274): 2.0745,
    (2, 275): 10.1066,
    (2, 278): -3.2623,
    (2, 277): -6.5386,
    (2, 274): 3.0944,
    (5, 275): -3.061,
    (5, 278): -4.371,
    (5, 277): 4.2517,
    (5, 274): 0.9058,
    (11, 275): 9.383,
    (11, 278): -6.1437,
    (11, 277): -2.6664,
    (11, 274): -1.5656,
}


def test_the_logits_are_those_of_transformers(model: Reference) -> None:
    logits = model.forward(IDS)[1]

    found = {place: float(logits[place]) for place in LOGITS}
    assert found == pytest.approx(LOGITS, abs=2e-3)


def test_no_token_sees_a_later_one(model: Reference) -> None:
    before = model.forward(IDS)[0]
    after = model.forward([*IDS[:6], 99, *IDS[7:]])[0]

    np.testing.assert_array_equal(before[:6], after[:6])
    assert (np.abs(before[6:] - after[6:]).max(axis=1) > 1e-3).all()


def test_a_sequence_is_the_same_as_its_beginning(model: Reference) -> None:
    whole, part = model.forward(IDS)[0], model.forward(IDS[:5])[0]

    np.testing.assert_allclose(whole[:5], part, atol=1e-4)


def test_every_tensor_matters(model: Reference) -> None:
    base = model.forward(IDS)[0]
    base_draft = model.mtp(IDS[1:], base[:-1])
    for name in model.weights:
        changed = Reference(model.config, {**model.weights, name: model.weights[name] * np.float32(1.5) + 0.01})
        hidden, logits = changed.forward(IDS)
        if name.startswith("mtp."):
            assert np.abs(changed.mtp(IDS[1:], hidden[:-1]) - base_draft).max() > 1e-4, name
        elif name == "lm_head.weight":
            assert np.abs(logits - model.logits(base)).max() > 1e-4
        else:
            assert np.abs(hidden - base).max() > 1e-4, name


def test_drafts_take_the_heads_own_hidden_states(model: Reference) -> None:
    hidden = model.forward(IDS)[0]

    drafts = model.draft(IDS, hidden, 3)
    first = model.mtp(IDS[1:], hidden[:-1])
    assert drafts[0] == int(model.logits(first)[-1].argmax())
    second = model.mtp([*IDS[1:], drafts[0]], np.concatenate([hidden[:-1], first[-1:]]))
    assert drafts[1] == int(model.logits(second)[-1].argmax())
    assert drafts[:2] == model.draft(IDS, hidden, 2)


def unit_rows(count: int, width: int) -> Floats:
    """`count` orthonormal rows."""
    matrix = np.random.default_rng(0).standard_normal((width, count))
    return np.linalg.qr(matrix)[0].T.astype(np.float32)


def test_the_delta_rule_recalls_the_last_value_of_each_key() -> None:
    keys = unit_rows(3, 8)
    order = [0, 1, 2, 1, 0, 2]
    k = keys[order][:, None, :]
    v = np.random.default_rng(1).standard_normal((6, 1, 5)).astype(np.float32)
    ones = np.ones((6, 1), np.float32)

    out = reference.delta_rule(k, k, v, ones, ones)
    np.testing.assert_allclose(out, v, atol=1e-5)  # each write replaced what the key held
    again = reference.delta_rule(np.roll(k, 1, axis=0), k, v, ones, ones)
    np.testing.assert_allclose(again[4], v[3], atol=1e-5)  # key 1, asked for after key 0 was rewritten


def test_the_delta_rule_decays_and_half_learns() -> None:
    k = np.ones((3, 1, 1), np.float32)
    v = np.array([[[8.0]], [[0.0]], [[0.0]]], np.float32)
    decay, beta = np.full((3, 1), 0.5, np.float32), np.full((3, 1), 0.25, np.float32)

    out = reference.delta_rule(k, k, v, decay, beta)
    assert out.ravel().tolist() == [2.0, 0.75, 0.28125]  # 8 / 4, then * 0.5 * (1 - 0.25) each step


@settings(max_examples=20)
@given(st.integers(0, 500))
def test_rotated_products_depend_on_the_distance_only(offset: int) -> None:
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((1, 1, 16)).astype(np.float32) for _ in range(2))

    def product(a: int, b: int) -> float:
        turned = [reference.rotate(x, np.array([at]), 1e4, 8) for x, at in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert product(offset + 3, offset) == pytest.approx(product(3, 0), abs=1e-3)
    assert product(3, 0) != pytest.approx(product(4, 0), abs=1e-3)


def test_rotation_leaves_the_other_dimensions() -> None:
    x = np.arange(12, dtype=np.float32).reshape(1, 1, 12)

    turned = reference.rotate(x, np.array([5]), 1e4, 4)
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    assert np.abs(turned[..., :4] - x[..., :4]).min() > 0.01


def test_the_last_tap_of_the_convolution_meets_the_present() -> None:
    x = np.array([[1.0], [10.0], [100.0]], np.float32)

    assert reference.causal_convolution(x, np.array([[2.0, 3.0]], np.float32)).ravel().tolist() == [
        3,
        32,
        320,
    ]


def test_another_model_type_is_refused(loud: Path, tmp_path: Path) -> None:
    config = json.loads((loud / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes((loud / "model.safetensors").read_bytes())

    with pytest.raises(VerificationError, match="model_type is 'llama'"):
        Reference.load(tmp_path)
