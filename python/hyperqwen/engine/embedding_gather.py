"""Gather and dequantize rows of a packed embedding; torch only, so that it runs on any machine with torch."""

from __future__ import annotations

import torch

from hyperqwen.engine.embedding import WORD_BITS


def gather_dequantize(
    ids: torch.Tensor,
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows `ids` of the embedding, in `dtype`.

    The reference that a kernel must match bit for bit: a code has at most 8 significant bits and a bf16 scale
    8, so the fp32 product is exact and only the final cast rounds. There is no data-dependent shape and no
    copy to the host, so a CUDA graph can capture it; offsets are torch's own, 64 bits wide where the tensor
    needs it.

    Args:
        ids: any shape, int64, each in [0, V).
        weight_packed: int32 [V, H * bits / 32].
        weight_scale: [V, H / group_size].

    Returns:
        A new tensor [*ids.shape, H].
    """
    flat = ids.reshape(ids.numel())
    words = weight_packed.index_select(0, flat)
    scale = weight_scale.index_select(0, flat).to(torch.float32)
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    # The shift of a negative word copies its sign bit down; the mask drops those copies.
    codes = words.unsqueeze(-1).bitwise_right_shift(shifts).bitwise_and_(2**bits - 1).sub_(2 ** (bits - 1))
    rows, groups = scale.shape
    values = codes.view(rows, groups, group_size).to(torch.float32).mul_(scale.unsqueeze(-1))
    return values.to(dtype).view(*ids.shape, groups * group_size)
