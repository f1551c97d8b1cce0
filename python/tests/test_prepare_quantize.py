from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyperqwen.prepare import quantize
from hyperqwen.prepare.tensors import from_bf16


def unpack_by_hand(word: int) -> list[int]:
    """The four values of a word, from the definition: lowest byte first, each stored 128 too large."""
    return [byte - 128 for byte in struct.pack("<i", word)]


def weights(seed: int, rows: int, columns: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


def test_a_word_holds_four_values_lowest_byte_first() -> None:
    # The same words come from compressed_tensors 0.17.0's pack_to_int32(value, num_bits=8).
    packed = quantize.pack(np.array([[1, 2, 3, 4, -128, 127, 0, -1]], np.int8))

    assert packed.tolist() == [[-2071756159, 2139160320]]
    assert [unpack_by_hand(word) for word in packed[0].tolist()] == [[1, 2, 3, 4], [-128, 127, 0, -1]]


@given(st.lists(st.lists(st.integers(-128, 127), min_size=8, max_size=8), min_size=1, max_size=4))
def test_unpacking_gives_back_what_was_packed(rows: list[list[int]]) -> None:
    values = np.array(rows, np.int8)
    packed = quantize.pack(values)

    assert packed.shape == (len(rows), 2)
    assert quantize.unpack(packed).tolist() == rows
    assert [[v for word in row for v in unpack_by_hand(word)] for row in packed.tolist()] == rows


@settings(max_examples=25)
@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_every_value_is_within_half_a_step(seed: int, size: float) -> None:
    weight = weights(seed, 3, 256) * np.float32(size)

    values, scale = quantize.quantize(weight)
    assert values.shape == (3, 256)
    assert scale.shape == (3, 2)
    step = np.abs(weight).reshape(3, 2, 128).max(axis=2) / 127
    error = np.abs(values.reshape(3, 2, 128) * step[:, :, None] - weight.reshape(3, 2, 128))
    assert (error <= step[:, :, None] * 0.5001).all()
    np.testing.assert_allclose(from_bf16(scale), step, rtol=2**-8)


def test_the_largest_of_a_group_becomes_127_and_ties_go_to_even() -> None:
    row = np.zeros(128, np.float32)
    row[:5] = [127.0, -127.0, 0.5, 1.5, -2.5]

    values, scale = quantize.quantize(row[None])
    assert values[0, :5].tolist() == [127, -127, 0, 2, -2]
    assert from_bf16(scale).tolist() == [[1.0]]


def test_groups_do_not_share_a_scale() -> None:
    weight = np.ones((1, 256), np.float32)
    weight[0, 128:] = 1000

    values, scale = quantize.quantize(weight)
    assert set(values[0].tolist()) == {127}
    assert from_bf16(scale)[0, 1] > 900 * from_bf16(scale)[0, 0]


def test_a_row_of_zeros_has_a_scale_that_is_not_zero() -> None:
    values, scale = quantize.quantize(np.zeros((1, 128), np.float32))

    assert not values.any()
    assert from_bf16(scale)[0, 0] == pytest.approx(1e-10, rel=2**-8)


def test_the_three_tensors_describe_the_weight() -> None:
    weight = weights(5, 4, 384)

    made = quantize.tensors("model.embed_tokens", weight)
    assert {name.removeprefix("model.embed_tokens."): (t.dtype.name, t.shape) for name, t in made.items()} == {
        "weight_packed": ("int32", (4, 96)),
        "weight_scale": ("uint16", (4, 3)),
        "weight_shape": ("int64", (2,)),
    }
    assert made["model.embed_tokens.weight_shape"].tolist() == [4, 384]
    back = quantize.dequantize(made["model.embed_tokens.weight_packed"], made["model.embed_tokens.weight_scale"])
    assert np.linalg.norm(back - weight) < 0.01 * np.linalg.norm(weight)


@pytest.mark.parametrize(("function", "columns"), [(quantize.quantize, 130), (quantize.pack, 6)])
def test_columns_that_do_not_fit_are_refused(function: object, columns: int) -> None:
    assert callable(function)
    with pytest.raises(ValueError, match=f"^{columns} columns"):
        function(np.zeros((1, columns), np.int8 if columns == 6 else np.float32))
