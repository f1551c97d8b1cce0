"""The inventory of tensors against the published counts and sizes of Qwen3.8-27B and its drafter, and its laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import BadInputError
from hyperqwen.prepare import geometry, weights
from hyperqwen.prepare.geometry import Geometry
from hyperqwen.prepare.weights import SCHEMES, Scheme, Tensor, loaded_weights

GIB = 1 << 30
QWEN = geometry.load("qwen3.8-27b")
DRAFTER = geometry.load_drafter("qwen3.8-27b-dflash2")
BASE, FAST, PLAIN = SCHEMES["base"], SCHEMES["fast"], SCHEMES["bf16"]
RAW = Scheme("raw", embedding=16, head=16, mtp=16, draft_head_rows=0)
"""The checkpoint that preparation starts from: layers in int4, the rest in bfloat16."""


def parameters(tensors: list[Tensor]) -> int:
    return sum(tensor.parameters for tensor in tensors)


def test_parameters_are_those_of_upstream_facts_1_1() -> None:
    text = list(weights.text_tensors(QWEN))
    body = [tensor for tensor in text if tensor.part == "body"]
    mixers = {
        kind: parameters([t for t in text if t.name.startswith(f"model.language_model.layers.{index}.{kind}.")])
        for kind, index in (("self_attn", 3), ("linear_attn", 0), ("mlp", 0))
    }
    assert round(mixers["self_attn"] / 1e6, 2) == 104.86
    assert round(mixers["linear_attn"] / 1e6, 2) == 115.88
    assert round(mixers["mlp"] / 1e6, 2) == 267.39
    assert round(parameters(body) / 1e9, 3) == 24.353
    # The facts say 26.895; unrounded it is 26.89599.
    assert parameters(text) / 1e9 == pytest.approx(26.895, abs=0.001)
    assert text[0].on_card(PLAIN) == 2_542_796_800


def test_the_mtp_head_is_that_of_upstream_facts_1_2() -> None:
    mtp = list(weights.mtp_tensors(QWEN))
    assert len(mtp) == 15
    assert round(parameters(mtp) / 1e6, 1) == 424.7
    assert round(sum(tensor.on_card(PLAIN) for tensor in mtp) / 1e6, 1) == 849.4


def test_the_tower_is_that_of_upstream_facts_1_3() -> None:
    assert QWEN.vision is not None
    tower = list(weights.vision_tensors(QWEN.vision))
    assert len(tower) == 333
    assert round(parameters(tower) / 1e6, 1) == 460.7
    assert round(sum(tensor.on_card(FAST) for tensor in tower) / GIB, 3) == 0.858


def test_the_drafter_is_that_of_upstream_facts_1_6_to_the_byte() -> None:
    tensors = list(weights.drafter_tensors(DRAFTER))
    quantized = [tensor for tensor in tensors if tensor.quantizable]
    assert parameters(quantized) == 2 * 865_075_200
    assert sum(tensor.count(FAST) for tensor in tensors) == 153
    assert sum(tensor.on_disk(FAST) for tensor in tensors) == 1_280_617_536
    assert parameters(tensors) / 1e9 == pytest.approx(1.92, abs=0.01)


def test_tensor_counts_are_those_of_upstream_facts_1_7() -> None:
    assert sum(tensor.count(RAW) for tensor in weights.checkpoint_tensors(QWEN, RAW)) == 1999
    assert sum(tensor.count(BASE) for tensor in weights.checkpoint_tensors(QWEN, BASE)) == 2022
    body = [tensor for tensor in weights.text_tensors(QWEN) if tensor.part == "body" and tensor.quantizable]
    assert len(body) == 400
    assert round(parameters(body) / 2 / 1e9, 3) == 12.163
    assert round(parameters(body) / 128 * 2 / 1e9, 3) == 0.380


def test_names_are_unique() -> None:
    names = [tensor.name for tensor in weights.checkpoint_tensors(QWEN, BASE)]
    assert len(set(names)) == len(names)


def test_the_embedding_in_int8_is_the_published_shard() -> None:
    """Upstream facts 2.2: shard 6 is 1,291,274,752 bytes: the embedding, the last norm, and a header of half a KiB."""
    shard = [
        tensor
        for tensor in weights.text_tensors(QWEN)
        if tensor.part == "embedding" or tensor.name == "model.language_model.norm.weight"
    ]
    assert len(shard) == 2
    assert 256 < 1_291_274_752 - sum(tensor.on_disk(FAST) for tensor in shard) < 1024


def test_checkpoints_are_as_large_as_published() -> None:
    size = {
        scheme.name: sum(tensor.on_disk(scheme) for tensor in weights.checkpoint_tensors(QWEN, scheme)) / GIB
        for scheme in (BASE, FAST)
    }
    assert size["base"] == pytest.approx(15.6, abs=0.05)
    assert size["fast"] == pytest.approx(14.71, abs=0.005)


def test_resident_weights_are_as_published() -> None:
    """Upstream facts 4.3: 14.26 GiB language only and 15.13 with vision, 0.41 of them no weights.

    Ours with vision are 15.117: the tower's buffers (0.013 GiB) are not weights either.
    """
    assert loaded_weights(QWEN, FAST, mtp=True).card_bytes / GIB + 0.41 == pytest.approx(14.26, abs=0.005)
    with_vision = loaded_weights(QWEN, FAST, mtp=True, vision="card").card_bytes / GIB + 0.41
    assert with_vision == pytest.approx(15.13, abs=0.02)


def test_what_is_in_host_memory_is_not_on_the_card() -> None:
    card = loaded_weights(QWEN, FAST, vision="card")
    host = loaded_weights(QWEN, FAST, vision="host", embedding_in_host=True)
    assert host.card_bytes + host.host_bytes == card.card_bytes
    assert set(host.host) == {"vision", "embedding"}
    # Upstream facts 4.3 say 1.25 GiB; it is 1.20 GiB, or 1.29 GB.
    assert round(host.host["embedding"] / GIB, 2) == 1.20


def test_a_tied_embedding_stays_on_the_card() -> None:
    tied = replace(QWEN, tie_word_embeddings=True)
    found = loaded_weights(tied, FAST, embedding_in_host=True)
    assert "head" not in found.card
    assert not found.host


def test_only_the_drafter_in_use_is_loaded() -> None:
    assert set(loaded_weights(QWEN, FAST).card) == {"embedding", "body", "head"}
    assert set(loaded_weights(QWEN, FAST, mtp=True).card) == {"embedding", "body", "head", "mtp", "draft head"}
    assert set(loaded_weights(QWEN, FAST, drafter=DRAFTER).card) == {"embedding", "body", "head", "drafter"}


def test_a_layer_that_has_no_whole_groups_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"rows of 192 values, which scheme fast cannot cut into groups of 128"):
        loaded_weights(replace(QWEN, intermediate_size=192), FAST)


def test_over_cards_each_layer_is_cut_and_norms_are_not() -> None:
    whole, half = loaded_weights(QWEN, FAST), loaded_weights(QWEN, FAST, cards=2)
    assert half.card["head"] * 2 == whole.card["head"]
    assert half.card["embedding"] * 2 == whole.card["embedding"]
    replicated = sum(t.on_card(FAST) for t in weights.text_tensors(QWEN) if t.part == "body" and t.cut is None)
    assert half.card["body"] * 2 == whole.card["body"] + replicated


def test_with_more_cards_than_key_value_heads_a_head_is_repeated() -> None:
    key = next(t for t in weights.text_tensors(QWEN) if t.name.endswith("k_proj.weight"))
    sizes = [key.on_card(FAST, cards, QWEN.num_key_value_heads) for cards in (1, 2, 4, 8)]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4, sizes[0] // 4]


@st.composite
def members(draw: st.DrawFn) -> Geometry:
    """Models of the family, smaller and larger than the 27B."""
    key_heads = draw(st.sampled_from([8, 16, 32]))
    interval = draw(st.integers(2, 6))
    keys = draw(st.sampled_from([2, 4, 8]))
    return replace(
        QWEN,
        name="member",
        hidden_size=128 * draw(st.integers(4, 64)),
        intermediate_size=1024 * draw(st.integers(2, 32)),
        num_hidden_layers=interval * draw(st.integers(1, 24)),
        full_attention_interval=interval,
        num_key_value_heads=keys,
        num_attention_heads=keys * draw(st.sampled_from([4, 8])),
        linear_num_key_heads=key_heads,
        linear_num_value_heads=key_heads * draw(st.integers(1, 3)),
        mtp_num_hidden_layers=draw(st.integers(0, 1)),
        vision=None,
    )


@given(member=members(), scheme=st.sampled_from([BASE, FAST, PLAIN]), cards=st.sampled_from([2, 4]))
def test_cards_together_hold_the_model_once_and_what_all_need_each(
    member: Geometry, scheme: Scheme, cards: int
) -> None:
    geometry.check_tensor_parallel(member, cards)
    tensors = [*weights.text_tensors(member), *weights.mtp_tensors(member)]
    for tensor in tensors:
        whole = tensor.on_card(scheme, 1, member.num_key_value_heads)
        part = tensor.on_card(scheme, cards, member.num_key_value_heads)
        if tensor.cut is None:
            assert part == whole
        else:
            assert whole <= part * cards <= whole * max(1, cards // member.num_key_value_heads)


@given(member=members())
def test_fewer_bits_are_fewer_bytes(member: Geometry) -> None:
    sizes = [loaded_weights(member, scheme, mtp=True).card_bytes for scheme in (FAST, BASE)]
    assert sizes == sorted(sizes)
    assert sizes[-1] < loaded_weights(member, PLAIN, mtp=True).card_bytes
