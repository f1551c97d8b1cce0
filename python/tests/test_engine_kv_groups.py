"""The size of KV groups: the model's layers stay unpadded, and nothing gets worse than in vLLM."""

from __future__ import annotations

import subprocess
import sys
from math import ceil
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.engine.kv_groups import group_size, stock_group_size


@pytest.mark.parametrize(
    ("layers", "size"),
    [
        ((16, 48, 5), 8),  # the 27B model and its DFlash2 drafter
        ((16, 48, 1), 1),
        ((16, 48, 2), 2),
        ((16, 48, 3), 4),
        ((16, 48, 8), 8),
        ((16, 48, 9), 16),
        ((12, 36, 5), 6),  # the smallest that fits, not the largest
        ((10, 30, 5), 5),
        ((9, 27, 5), 9),
        ((17, 51, 5), 5),  # 17 would pad the drafter by 12: vLLM's own
        ((16, 51, 5), 5),  # no common divisor but 1
        ((2, 6, 5), 2),  # the drafter is not the smallest
        ((13, 12), 13),
    ],
)
def test_beside_a_drafter(layers: tuple[int, ...], size: int) -> None:
    assert group_size(layers, [False] * (len(layers) - 1) + [True]) == size


def test_without_a_drafter_it_is_vllms() -> None:
    assert group_size([16, 48, 5], [False, False, False]) == 5
    assert group_size([4, 20], [False, True]) == 4
    assert group_size([5], [True]) == 5
    assert group_size([16, 48, 5], [False, False, False], stock=3) == 3
    assert group_size([17, 51, 5], [False, False, True], stock=3) == 3
    assert group_size([16, 48, 5], [False, False, True], stock=3) == 8


@pytest.mark.parametrize(
    ("layers", "size"), [((16, 48, 5), 5), ((12, 13), 13), ((10, 15), 10), ((10, 14), 14), ((7,), 7)]
)
def test_vllms_own_rule(layers: tuple[int, ...], size: int) -> None:
    assert stock_group_size(layers) == size


BUCKETS = st.lists(st.tuples(st.integers(1, 64), st.booleans()), min_size=1, max_size=5)


@given(BUCKETS)
def test_never_more_groups_and_the_model_unpadded(buckets: list[tuple[int, bool]]) -> None:
    layers, sliding = [count for count, _ in buckets], [window for _, window in buckets]
    stock, size = stock_group_size(layers), group_size(layers, sliding)
    assert sum(ceil(count / size) for count in layers) <= sum(ceil(count / stock) for count in layers)
    if size == stock:
        return
    drafter = layers.index(min(layers))
    assert sliding[drafter] and layers[drafter] <= size < 2 * layers[drafter]
    assert [count % size for index, count in enumerate(layers) if index != drafter] == [0] * (len(layers) - 1)
    # No smaller size does both.
    others = layers[:drafter] + layers[drafter + 1 :]
    assert not any(all(count % less == 0 for count in others) for less in range(layers[drafter], size))


@given(BUCKETS, st.randoms(use_true_random=False))
def test_the_order_of_the_buckets_does_not_matter(buckets: list[tuple[int, bool]], random: Random) -> None:
    mixed = list(buckets)
    random.shuffle(mixed)
    ours, theirs = (group_size([n for n, _ in some], [window for _, window in some]) for some in (buckets, mixed))
    assert ours == theirs


@pytest.mark.parametrize(
    ("layers", "sliding", "message"),
    [
        ([], [], "at least one bucket"),
        ([16, 0], [False, True], "at least one layer"),
        ([16, 5], [True], "differ in length"),
    ],
)
@pytest.mark.parametrize("stock", [None, 4])
def test_what_is_no_list_of_buckets(layers: list[int], sliding: list[bool], message: str, stock: int | None) -> None:
    with pytest.raises(ValueError, match=message):
        group_size(layers, sliding, stock)


def test_the_module_stands_alone() -> None:
    """The planner imports it where there is no engine, and vLLM while it starts."""
    code = (
        "import sys, hyperqwen.engine.kv_groups\n"
        "print([name for name in ('vllm', 'torch', 'pydantic', 'click') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
