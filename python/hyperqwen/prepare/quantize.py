"""Group-wise int8 weights in the form compressed-tensors calls pack-quantized.

A weight [rows, columns] becomes three tensors:

    weight_packed  int32 [rows, columns / 4]   four values of a row per word, first value in the lowest byte,
    each + 128 weight_scale   bf16  [rows, columns / group] weight_shape   int64 [2]                   rows,
    columns

with value = (byte - 128) * scale. The rule is symmetric round-to-nearest: scale = max|w| / 127 over the
group, at least 1e-10, and q = clamp(round-half-even(w / scale), -128, 127). The division uses the float32
scale; only its stored copy is rounded to bfloat16, as in the published 27B checkpoints whose embedding is
int8.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperqwen.prepare.tensors import Array, from_bf16, to_bf16

BITS = 8
GROUP = 128
"""Columns that share a scale."""

_SMALLEST = np.float32(1e-10)
_PER_WORD = 32 // BITS
_OFFSET = 1 << (BITS - 1)


def quantize(weight: NDArray[np.float32], group: int = GROUP) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
    """Values int8 [rows, columns] and scales bf16 bits [rows, columns / group] of a weight [rows, columns].

    Raises ValueError unless `group` divides the columns.
    """
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"{columns} columns do not divide into groups of {group}")
    grouped = weight.astype(np.float32).reshape(rows, columns // group, group)
    scale = np.maximum(np.abs(grouped).max(axis=2) / np.float32(127), _SMALLEST)
    values = np.clip(np.rint(grouped / scale[:, :, None]), -128, 127).astype(np.int8)
    return values.reshape(rows, columns), to_bf16(scale)


def pack(values: NDArray[np.int8]) -> NDArray[np.int32]:
    """int8 [rows, columns] -> int32 [rows, columns / 4]. Raises ValueError unless 4 divides the columns."""
    rows, columns = values.shape
    if columns % _PER_WORD:
        raise ValueError(f"{columns} columns do not fill whole 32-bit words")
    unsigned = (values.astype(np.int16) + _OFFSET).astype(np.uint8)
    return np.ascontiguousarray(unsigned).view("<i4").reshape(rows, columns // _PER_WORD)


def unpack(packed: NDArray[np.int32]) -> NDArray[np.int8]:
    """int32 [rows, words] -> int8 [rows, 4 * words]."""
    rows, words = packed.shape
    unsigned = np.ascontiguousarray(packed.astype("<i4")).view(np.uint8).reshape(rows, words * _PER_WORD)
    return (unsigned.astype(np.int16) - _OFFSET).astype(np.int8)


def dequantize(packed: NDArray[np.int32], scale: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 [rows, columns] from the packed words and the bf16 bits of the scales."""
    values = unpack(packed).astype(np.float32)
    rows, columns = values.shape
    groups = scale.shape[1]
    grouped = values.reshape(rows, groups, columns // groups) * from_bf16(scale)[:, :, None]
    return grouped.reshape(rows, columns)


def tensors(prefix: str, weight: NDArray[np.float32], group: int = GROUP) -> dict[str, Array]:
    """The three tensors that stand for `<prefix>.weight` in a checkpoint."""
    values, scale = quantize(weight, group)
    return {
        f"{prefix}.weight_packed": pack(values),
        f"{prefix}.weight_scale": scale,
        f"{prefix}.weight_shape": np.array(weight.shape, dtype=np.int64),
    }


def config(target: str, group: int = GROUP) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in which only the modules that match `target` are
    quantized."""
    weights = {
        "num_bits": BITS,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "observer": "minmax",
        "actorder": None,
        "block_structure": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "version": "0.17.0",
        "config_groups": {
            "group_0": {
                "targets": [target],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
