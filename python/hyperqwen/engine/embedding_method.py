"""The quantization method that patch 0005 gives to vLLM's VocabParallelEmbedding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.utils import set_weight_attrs

from hyperqwen.engine.embedding import EmbeddingScheme
from hyperqwen.engine.embedding_gather import gather_dequantize

# What a tensor holds until it is loaded, beside NaN for the scales. vLLM does not look for missing tensors in
# a quantized model, and memory that nobody wrote would be served as an embedding. No real row is codes 127,
# 127, 127, -1 (4 bits: seven times 7, then -1) from end to end.
_UNLOADED_WORDS = 0x7FFFFFFF
_UNLOADED_SHAPE = -1

Gather = Callable[..., torch.Tensor]


class QuantizedTokenEmbedding(QuantizeMethodBase):  # type: ignore[misc]
    """Keep the packed tensors and dequantize the rows that are looked up.

    With tensor parallelism each rank holds its rows of the packed tensor and of the scales;
    VocabParallelEmbedding pads them with zero rows, masks foreign tokens and sums over the ranks.

    Args:
        scheme: how the rows are stored.
        name: the embedding's name, for messages.
        loads_bytes: False where the weights are made up ("dummy" load format), and so not checked.
        gather: looks up and dequantizes; any other has the signature and the result of `gather_dequantize`.
    """

    supports_pre_processed_weights = True
    requires_device_loading = False

    def __init__(
        self,
        scheme: EmbeddingScheme,
        name: str,
        *,
        loads_bytes: bool = True,
        gather: Gather = gather_dequantize,
    ) -> None:
        self.scheme = scheme
        self.name = name
        self.loads_bytes = loads_bytes
        self.gather = gather
        self.dtype = torch.bfloat16

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the packed tensors, to be filled by a loader that checks what the checkpoint holds."""
        hidden, rows = input_size_per_partition, sum(output_partition_sizes)
        vocab = layer.org_vocab_size
        words, groups = self.scheme.packed_width(hidden), self.scheme.groups(hidden)
        self.dtype = params_dtype
        load = extra_weight_attrs["weight_loader"]

        def add(suffix: str, data: torch.Tensor, stored: tuple[int, ...], attributes: dict[str, Any]) -> None:
            name, dtype = f"{self.name}.{suffix}", data.dtype

            def load_checked(parameter: torch.nn.Parameter, loaded: torch.Tensor) -> None:
                if loaded.shape != stored or loaded.dtype != dtype:
                    self._refuse(
                        f"{name} is {loaded.dtype} {list(loaded.shape)}, not {dtype} {list(stored)}"
                        f" (vocabulary {vocab}, hidden size {hidden}, {self.scheme.bits} bits, groups of"
                        f" {self.scheme.group_size})"
                    )
                if suffix == "weight_shape" and loaded.tolist() != [vocab, hidden]:
                    self._refuse(f"{name} holds {loaded.tolist()}, not {[vocab, hidden]}")
                load(parameter, loaded)

            parameter = torch.nn.Parameter(data, requires_grad=False)
            set_weight_attrs(parameter, {"weight_loader": load_checked, **attributes})
            layer.register_parameter(suffix, parameter)

        by_row = {"output_dim": 0, "input_dim": 1}
        # A dummy load fills the floating-point tensors and leaves the others as they are made here.
        fill, shape = (_UNLOADED_WORDS, [_UNLOADED_SHAPE] * 2) if self.loads_bytes else (0, [vocab, hidden])
        packed = torch.full((rows, words), fill, dtype=torch.int32)
        scale = torch.full((rows, groups), torch.nan, dtype=torch.bfloat16)
        add("weight_packed", packed, (vocab, words), by_row)
        add("weight_scale", scale, (vocab, groups), by_row)
        add("weight_shape", torch.tensor(shape, dtype=torch.int64), (2,), {})
        # vLLM asks whether `weight` of a target and of its draft is a tensor before it compares the two;
        # without the attribute the question itself raises.
        layer.register_parameter("weight", None)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Refuse an embedding of which a tensor was missing or a scale is not a number."""
        if not self.loads_bytes:
            return
        unloaded = {
            "weight_packed": layer.weight_packed[:1] == _UNLOADED_WORDS,
            "weight_scale": layer.weight_scale[:1].isnan(),
            "weight_shape": layer.weight_shape == _UNLOADED_SHAPE,
        }
        missing = [f"{self.name}.{suffix}" for suffix, marks in unloaded.items() if bool(marks.all())]
        if missing:
            self._refuse(f"missing from the checkpoint: {', '.join(missing)}")
        finite = layer.weight_scale.isfinite()
        if not bool(finite.all()):
            count, total = int((~finite).sum()), finite.numel()
            self._refuse(f"{self.name}.weight_scale has {count} of {total} values that are not finite")

    def embedding(self, layer: torch.nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """Rows for the token ids `input_` (int64, any shape), in the model's dtype."""
        return self.gather(
            input_,
            layer.weight_packed,
            layer.weight_scale,
            bits=self.scheme.bits,
            group_size=self.scheme.group_size,
            dtype=self.dtype,
        )

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        """vLLM's base class demands it, for use as an output head; a head has its own tensors and method."""
        raise RuntimeError(f"{self.name}: a quantized token embedding is for lookup, not for use as lm_head")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(f"quantized token embedding: {what}. Prepare the checkpoint again")
