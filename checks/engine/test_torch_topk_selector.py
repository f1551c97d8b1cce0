"""Patch 0008: VLLM_USE_FLASHINFER_SAMPLER=0 keeps FlashInfer out of DFlash2's candidate top-k too.

Runs in the engine's environment. FlashInfer is a CUDA wheel: a stand-in of its one function shows whether it is asked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from vllm.model_executor.layers import logits_processor
from vllm.platforms.interface import Platform, PlatformEnum


class Cuda(Platform):
    """The platform as far as the place asks; vLLM's own class loads the CUDA extension."""

    _enum = PlatformEnum.CUDA


def top_k(*arguments: object, **options: object) -> None:
    raise AssertionError("FlashInfer was asked, and would compile for minutes")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    flashinfer = ModuleType("flashinfer")
    flashinfer.top_k = top_k  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(logits_processor, "current_platform", Cuda())
    monkeypatch.setattr(logits_processor, "has_flashinfer", lambda: True)
    logits_processor._flashinfer_topk.cache_clear()
    yield
    logits_processor._flashinfer_topk.cache_clear()


@pytest.mark.usefixtures("cuda")
def test_the_switch_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    assert logits_processor._flashinfer_topk() is None


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("value", [None, "1"])
def test_without_the_switch_it_is_flashinfer(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    if value is not None:
        monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", value)
    assert logits_processor._flashinfer_topk() is top_k


def test_what_torch_returns() -> None:
    """The values, best first, and the ids: what the selector reads from either."""
    scores = torch.tensor([[0.5, 3.0, -1.0, 2.0], [1.0, 0.0, 4.0, 2.5]])
    values, ids = logits_processor._topk(scores, 2)
    assert values.tolist() == [[3.0, 2.0], [4.0, 2.5]] and ids.tolist() == [[1, 3], [2, 3]]
