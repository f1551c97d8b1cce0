"""Quantized token embedding of the qwen3_5 models: is there one, and is it one that we can serve?

vLLM builds the embedding of qwen3_5 and of its MTP module without a quantization method, so a checkpoint
whose embedding is packed does not load. Patch 0005 asks `token_embedding_method` and
`shared_token_embedding_method` for one.

Served form: compressed-tensors "pack-quantized", weight-only, symmetric, 4 or 8 bits, groups along the hidden
size H, for V tokens:

    weight_packed  int32 [V, H * bits / 32]   32 / bits codes a word, first lowest, as code + 2**(bits - 1)
    weight_scale   bf16  [V, H / group_size]
    weight_shape   int64 [2]                  (V, H)

At 27B (V = 248320, H = 5120, 8 bits, groups of 128) that is 1.20 GiB instead of 2.37 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyperqwen.engine.embedding_method import QuantizedTokenEmbedding

BITS = (4, 8)
WORD_BITS = 32

_MODULE = "model.embed_tokens"
# The one embedding has another name in vLLM (text-only, multimodal) and in a checkpoint, and a target or an
# ignore entry may use any of them.
_SPELLINGS = (_MODULE, "language_model.model.embed_tokens", "model.language_model.embed_tokens")


@dataclass(frozen=True, slots=True)
class EmbeddingScheme:
    """How the rows are stored: `bits` a code, one scale for each `group_size` codes of a row."""

    bits: int
    group_size: int

    def packed_width(self, hidden: int) -> int:
        """Words in a row of `hidden` codes."""
        return hidden * self.bits // WORD_BITS

    def groups(self, hidden: int) -> int:
        """Scales in a row of `hidden` codes."""
        return hidden // self.group_size


def parse_scheme(name: str, scheme: Mapping[str, Any], hidden: int) -> EmbeddingScheme:
    """Check a compressed-tensors scheme.

    Args:
        name: the embedding's module name, for the message.
        scheme: "weights" (compressed-tensors' QuantizationArgs), "input_activations", "output_activations",
            "format".
        hidden: columns of the embedding.

    Raises:
        ValueError: the scheme is not one that is served; lists every difference.
    """
    weights = scheme["weights"]
    wrong: list[str] = []

    def need(field: str, value: object, fits: bool, wanted: str) -> None:
        if not fits:
            wrong.append(f"{field} is {getattr(value, 'value', value)!r}, not {wanted}")

    bits, group_size = weights.num_bits, weights.group_size
    need("num_bits", bits, bits in BITS, "4 or 8")
    need("type", weights.type, weights.type == "int", "'int'")
    need("symmetric", weights.symmetric, weights.symmetric is True, "True")
    need("strategy", weights.strategy, weights.strategy == "group", "'group'")
    need("dynamic", weights.dynamic, weights.dynamic is False, "False")
    need("actorder", weights.actorder, weights.actorder is None, "None")
    divides = isinstance(group_size, int) and group_size > 0 and hidden % group_size == 0
    need("group_size", group_size, divides, f"a divisor of hidden_size {hidden}")
    if bits in BITS:
        need("hidden_size", hidden, hidden * bits % WORD_BITS == 0, f"a multiple of {WORD_BITS // bits}")
    need("format", scheme.get("format"), scheme.get("format") == "pack-quantized", "'pack-quantized'")
    for field in ("input_activations", "output_activations"):
        need(field, scheme.get(field), scheme.get(field) is None, "None")

    if wrong:
        raise ValueError(
            f"{name}: cannot serve this quantized token embedding: {'; '.join(wrong)}. Quantize it with "
            "num_bits 8, symmetric, strategy 'group', group_size 128, or leave it out of quantization_config"
        )
    return EmbeddingScheme(bits, group_size)


def token_embedding_method(vllm_config: Any, name: str) -> QuantizedTokenEmbedding | None:
    """The method for the target model's token embedding, or None where the checkpoint does not quantize it.

    Args:
        vllm_config: vLLM's VllmConfig of the model that is being built.
        name: the embedding's module name.

    Raises:
        ValueError: the embedding is quantized in a way that is not served, or the output head is tied to it.
    """
    config = vllm_config.model_config.hf_text_config
    scheme = _find_scheme(vllm_config.quant_config, name)
    if scheme is None:
        return None
    parsed = parse_scheme(name, scheme, config.hidden_size)
    if getattr(config, "tie_word_embeddings", False):
        raise ValueError(
            f"{name}: tie_word_embeddings is true, but a packed embedding cannot be multiplied as lm_head. "
            "Store lm_head.weight in the checkpoint and set tie_word_embeddings to false"
        )

    from hyperqwen.engine.embedding_method import QuantizedTokenEmbedding

    return QuantizedTokenEmbedding(parsed, name, loads_bytes=vllm_config.load_config.load_format != "dummy")


def shared_token_embedding_method(vllm_config: Any) -> QuantizedTokenEmbedding | None:
    """The method for the MTP module's copy of the target's token embedding, or None as above.

    vLLM builds an embedding for the draft, loads the target's tensors into it, and then puts the target's in
    its place (with pipeline parallelism the copy stays). So the target's name decides, not
    "mtp.embed_tokens", which a group for the MTP layers would match.

    Raises:
        ValueError: as `token_embedding_method`; or the checkpoint has an embedding of MTP's own, which vLLM
            would load over the shared one.
    """
    method = token_embedding_method(vllm_config, _MODULE)
    config = vllm_config.model_config.hf_text_config
    if method is not None and getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ValueError(
            "mtp_use_dedicated_embeddings is true: MTP with an embedding of its own cannot be served beside "
            "a quantized token embedding. Serve without MTP, or store the embedding unquantized"
        )
    return method


def _find_scheme(quant_config: Any, name: str) -> Mapping[str, Any] | None:
    """The scheme whose target is the embedding, by any of its names or as a torch Embedding."""
    if quant_config is None or quant_config.get_name() != "compressed-tensors":
        return None

    from torch import nn
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import should_ignore_layer

    names = dict.fromkeys((name, *_SPELLINGS))
    if any(should_ignore_layer(spelling, quant_config.ignore) for spelling in names):
        return None
    for spelling in names:
        # Only the class name is looked at. Who wrote the checkpoint saw Hugging Face's class, not vLLM's.
        scheme: Mapping[str, Any] | None = quant_config.get_scheme_dict(nn.Embedding(0, 1), spelling)
        if scheme and scheme.get("weights") is not None:
            return scheme
    return None
