from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.errors import VerificationError
from hyperqwen.prepare import tensors

finite = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**127), max_value=2.0**127)


def value_of(bits: int) -> float:
    """A bfloat16 is the upper half of a float32."""
    number: float = struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    return number


@given(finite)
def test_rounding_is_to_the_nearest_and_ties_go_to_even(number: float) -> None:
    bits = int(tensors.to_bf16(np.array([number], np.float32))[0])

    exact, rounded = Fraction(number), Fraction(value_of(bits))
    neighbours = [b for b in (bits - 1, bits + 1) if 0 <= b <= 0xFFFF and math.isfinite(value_of(b))]
    for other in neighbours:
        distance, theirs = abs(exact - rounded), abs(exact - Fraction(value_of(other)))
        assert distance < theirs or (distance == theirs and (bits % 2 == 0 or rounded == value_of(other)))


@pytest.mark.parametrize(
    ("number", "expected"),
    [(1.0, 0x3F80), (1.00390625, 0x3F80), (1.01171875, 0x3F82), (-2.0, 0xC000), (0.0, 0), (-0.0, 0x8000)],
)
def test_known_patterns(number: float, expected: int) -> None:
    assert int(tensors.to_bf16(np.array([number]))[0]) == expected


@given(st.integers(0, 0x7F7F) | st.integers(0x8000, 0xFF7F))
def test_a_bfloat16_survives_widening_and_rounding(bits: int) -> None:
    stored = np.array([bits], np.uint16)

    assert tensors.to_bf16(tensors.from_bf16(stored)).tolist() == [bits]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(number: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        tensors.to_bf16(np.array([number]))


SAMPLE: dict[str, tensors.Array] = {
    "z": np.arange(6, dtype=np.uint16).reshape(2, 3),
    "a": np.array([1.5, -2.0], np.float32),
    "shape": np.array([7, 8], np.int64),
    "packed": np.array([[-1, 2]], np.int32),
    "empty": np.zeros((0, 4), np.float32),
}


def test_the_safetensors_library_reads_what_is_written() -> None:
    data = tensors.encode(SAMPLE)

    deserialize: Any = safetensors.deserialize
    read: dict[str, dict[str, Any]] = dict(deserialize(data))
    assert {name: (t["dtype"], t["shape"]) for name, t in read.items()} == {
        "z": ("BF16", [2, 3]),
        "a": ("F32", [2]),
        "shape": ("I64", [2]),
        "packed": ("I32", [1, 2]),
        "empty": ("F32", [0, 4]),
    }
    for name, array in SAMPLE.items():
        assert bytes(read[name]["data"]) == array.tobytes(), name


def test_the_bytes_do_not_depend_on_the_order_of_the_tensors() -> None:
    assert tensors.encode(SAMPLE) == tensors.encode(dict(reversed(SAMPLE.items())))


def test_the_payload_is_aligned() -> None:
    for count in range(1, 9):
        data = tensors.encode({"t" * count: np.zeros(1, np.float32)})
        assert int.from_bytes(data[:8], "little") % 8 == 0


def test_decode_gives_back_what_was_encoded() -> None:
    back = tensors.decode(tensors.encode(SAMPLE), "sample")

    assert back.keys() == SAMPLE.keys()
    for name, array in SAMPLE.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


@given(st.data())
def test_a_cut_or_lengthened_file_is_refused(data: st.DataObject) -> None:
    whole = tensors.encode(SAMPLE)
    changed = data.draw(
        st.one_of(
            st.integers(0, len(whole) - 1).map(lambda end: whole[:end]),
            st.binary(min_size=1, max_size=9).map(lambda more: whole + more),
        )
    )

    with pytest.raises(VerificationError, match=r"^broken\.safetensors: "):
        tensors.decode(changed, "broken.safetensors")


def test_a_header_that_is_not_one_is_refused() -> None:
    text = b'{"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}'.ljust(72)

    with pytest.raises(VerificationError, match="F8_E4M3"):
        tensors.decode(len(text).to_bytes(8, "little") + text + b"x", "other")


def test_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="bad: dtype float64"):
        tensors.encode({"bad": np.zeros(1)})
