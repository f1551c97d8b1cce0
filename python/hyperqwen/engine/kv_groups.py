"""How many layers share a block of the KV pool, in a hybrid model with a drafter.

vLLM sorts the layers into buckets of one kind (attention, recurrent state, sliding window), and cuts every bucket
into groups of one size. Each group has a block table of its own; a block is `size` pages, one a layer, and a group
that lacks layers pads its blocks. vLLM takes the smallest bucket as the size. With the DFlash2 drafter beside a
27B model (16 attention layers, 48 recurrent ones, 5 sliding windows) that is 5: the drafter pads nothing, and the
model, whose pages grow with the context, 4 layers of 20 and 2 of 50.

Patch 0007 calls `group_size`. This module imports nothing, so that the planner can use it without an engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def group_size(layers: Sequence[int], sliding: Sequence[bool], stock: int | None = None) -> int:
    """The number of layers in a group.

    Where the smallest bucket holds sliding windows only, a drafter's, its n layers become one group, and the size is
    the smallest common divisor of the other buckets that is at least n: they pad nothing then. Only the drafter pads
    its blocks, and those are bounded by its window. Were that as many layers as it has (size >= 2n), or is there no
    such divisor, the size is vLLM's own. So are there never more groups than vLLM makes.

    For 16, 48 and a drafter's 5 it is 8: a pool of 5,583,457,484 bytes holds 380 blocks of 8 pages of 1,835,008
    bytes, and a request of 65,536 tokens takes 357 of them; in vLLM's groups of 5 it takes 683 of 608.

    Args:
        layers: layers in each bucket.
        sliding: for each bucket, whether every layer of it attends to a window and no further.
        stock: what vLLM chooses; default is what 0.31.0 does (`stock_group_size`).

    Raises:
        ValueError: the two do not describe the same buckets, or a bucket is empty.
    """
    if len(layers) != len(sliding):
        raise ValueError(f"layers {list(layers)} and sliding {list(sliding)} differ in length: one entry a bucket")
    if stock is None:
        stock = stock_group_size(layers)
    else:
        _check(layers)
    drafter = min(range(len(layers)), key=layers.__getitem__)
    smallest = layers[drafter]
    others = [count for bucket, count in enumerate(layers) if bucket != drafter]
    if not sliding[drafter] or not others:
        return stock
    common = math.gcd(*others)
    return next((size for size in range(smallest, min(2 * smallest, common + 1)) if common % size == 0), stock)


def stock_group_size(layers: Sequence[int]) -> int:
    """What vLLM 0.31.0 chooses: the smallest bucket, or the largest where that is less than half as large again.

    Raises:
        ValueError: there is no bucket, or one is empty.
    """
    _check(layers)
    smallest, largest = min(layers), max(layers)
    return largest if largest < smallest * 1.5 else smallest


def _check(layers: Sequence[int]) -> None:
    if not layers or min(layers) < 1:
        raise ValueError(f"layers {list(layers)}: expected at least one bucket, each of at least one layer")
