"""Arrays as checkpoints store them: bfloat16 by explicit rounding, safetensors files byte for byte.

NumPy has no bfloat16. Here a bfloat16 array is the `uint16` array of its bit patterns, so `uint16` never
means anything else; the other dtypes are themselves. The file is written by hand and not by the safetensors
library, whose Python entry points that take raw bytes have changed shape between releases: the bytes of a
derivation must not follow them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyperqwen.errors import VerificationError

Array = NDArray[Any]

_CODES: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
_NAMES = {dtype: code for code, dtype in _CODES.items()}
_MAX_HEADER = 100_000_000
"""The safetensors library refuses longer headers."""


def to_bf16(values: Array) -> NDArray[np.uint16]:
    """Round to bfloat16, nearest and ties to even; returns bit patterns.

    float64 input is rounded to float32 first, which is again nearest-even: the result is the same on every
    machine. Raises ValueError for values that are not finite.
    """
    single = np.ascontiguousarray(values, dtype=np.float32)
    if not np.isfinite(single).all():
        raise ValueError("bfloat16 rounding here is for finite values only")
    bits = single.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bfloat16 bit patterns, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def as_float(array: Array) -> NDArray[np.float32]:
    """float32 values of a stored array: bfloat16 widened, float32 as it is."""
    return from_bf16(array) if array.dtype == np.uint16 else array.astype(np.float32)


def encode(tensors: Mapping[str, Array]) -> bytes:
    """A safetensors file: tensors in name order without gaps, header padded with spaces to 8 bytes.

    Raises ValueError for a dtype that is not bfloat16 bits, float32, int32 or int64.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    payload: list[bytes] = []
    offset = 0
    for name, array in sorted(tensors.items()):
        code = _NAMES.get(array.dtype.newbyteorder("<"))
        if code is None:
            raise ValueError(f"{name}: dtype {array.dtype} is not written here")
        raw = array.astype(_CODES[code]).tobytes()
        header[name] = {
            "dtype": code,
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        payload.append(raw)
        offset += len(raw)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *payload])


def decode(data: bytes, source: str) -> dict[str, Array]:
    """The tensors of a safetensors file. `source` names it in errors.

    Raises VerificationError where the header is not one, or where it promises other bytes than there are.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_MAX_HEADER, len(data) - 8):
        raise VerificationError(f"{source}: {len(data)} bytes are too few for a safetensors header of {length} bytes")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        payload = memoryview(data)[8 + length :]
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if end != len(payload):
            raise VerificationError(
                f"{source}: the header promises {end} bytes of tensors, the file holds {len(payload)}"
            )
        tensors: dict[str, Array] = {}
        for name, entry in entries.items():
            start, stop = entry["data_offsets"]
            array: Array = np.frombuffer(payload[start:stop], dtype=_CODES[entry["dtype"]])
            tensors[name] = array.reshape(entry["shape"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerificationError(f"{source}: not a safetensors file that this reads: {error!r}") from error
    return tensors


def read(path: Path) -> dict[str, Array]:
    """The tensors of the safetensors file at `path`."""
    return decode(path.read_bytes(), str(path))
