"""Every tensor of a checkpoint, and the bytes that it takes: on disk, on a card, on each of several cards.

One inventory gives parameter counts, tensor counts, sizes under a quantization scheme and what tensor parallelism
cuts. Shapes are Qwen3.5's (transformers) and DFlash2's; what is cut how is vLLM 0.31.0's (qwen3_5.py,
qwen3_5_mtp.py, qwen3_dflash.py, qwen3_dflash2.py, qwen_gdn_linear_attn.py, qwen3_vl.py). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Literal

from hyperqwen.errors import BadInputError
from hyperqwen.prepare.geometry import GROUP, Drafter, Geometry, Vision, key_value_heads

Bits = Literal[4, 8, 16]
Part = Literal["body", "embedding", "head", "mtp", "draft head", "vision", "drafter"]
Placement = Literal["off", "host", "card"]
Cut = Literal["rows", "columns", "key-value rows", "first", None]

SCALE_BYTES = 2
"""A group's scale: float16 in a linear layer, bfloat16 in the embedding."""

SHAPE_BYTES = 16
"""`weight_shape`, two int64 beside every quantized tensor on disk."""

DRAFT_VOCABULARY = 40_960
"""Rows of the MTP drafter's own head."""


@dataclass(frozen=True)
class Scheme:
    """Bits of each part's weights. Below 16 they are symmetric integers with a 16-bit scale for each 128 columns of a
    row; norms, convolutions and the small projections of the recurrence are always bfloat16.

    draft_head_rows: rows of the MTP drafter's own head, 0 without one.
    """

    name: str
    body: Bits = 4
    embedding: Bits = 8
    head: Bits = 4
    mtp: Bits = 4
    draft_head: Bits = 4
    draft_head_rows: int = DRAFT_VOCABULARY
    drafter: Bits = 4

    def bits(self, part: Part) -> Bits:
        """Bits of the quantized tensors of `part`."""
        by_part: dict[Part, Bits] = {
            "body": self.body,
            "embedding": self.embedding,
            "head": self.head,
            "mtp": self.mtp,
            "draft head": self.draft_head,
            "vision": 16,
            "drafter": self.drafter,
        }
        return by_part[part]


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("base", head=8, mtp=8, draft_head=8),
        Scheme("fast"),
        # A checkpoint of bfloat16, such as nano.
        Scheme("bf16", body=16, embedding=16, head=16, mtp=16, draft_head=16, draft_head_rows=0, drafter=16),
    )
}


@dataclass(frozen=True)
class Tensor:
    """A tensor of the unquantized checkpoint.

    shape: [output, input] of a linear layer. quantizable: whether a scheme may quantize it. cut: the axis that several
    cards share, None where each has all of it.
    """

    name: str
    shape: tuple[int, ...]
    part: Part
    quantizable: bool = False
    cut: Cut = None

    @property
    def parameters(self) -> int:
        return prod(self.shape)

    def on_card(self, scheme: Scheme, cards: int = 1, heads: int = 1) -> int:
        """Bytes on each of `cards` cards. `heads`: key-value heads of a tensor cut into "key-value rows".

        Raises BadInputError for a quantized row that is no whole number of groups.
        """
        shape = list(self.shape)
        if self.cut == "key-value rows":
            shape[0] = shape[0] // heads * key_value_heads(heads, cards)
        elif self.cut in ("rows", "first"):
            shape[0] = -(-shape[0] // cards)
        elif self.cut == "columns":
            shape[1] = -(-shape[1] // cards)
        bits = scheme.bits(self.part) if self.quantizable else 16
        values = prod(shape) * bits // 8
        if bits == 16:
            return values
        if shape[1] % GROUP:
            raise BadInputError(
                f"{self.name} has rows of {shape[1]} values{f' on each of {cards} cards' if cards > 1 else ''}, which "
                f"scheme {scheme.name} cannot cut into groups of {GROUP}",
                "use the scheme bf16",
            )
        return values + shape[0] * (shape[1] // GROUP) * SCALE_BYTES

    def on_disk(self, scheme: Scheme) -> int:
        """Bytes in a checkpoint, without the file's header."""
        quantized = self.quantizable and scheme.bits(self.part) < 16
        return self.on_card(scheme) + (SHAPE_BYTES if quantized else 0)

    def count(self, scheme: Scheme) -> int:
        """Tensors in a checkpoint: a quantized one is three (packed values, scales, shape)."""
        return 3 if self.quantizable and scheme.bits(self.part) < 16 else 1


# Inventories ------------------------------------------------------------------------------------------------------


def text_tensors(geometry: Geometry) -> Iterator[Tensor]:
    """The language model: embedding, layers, last norm, head (none where it is tied to the embedding)."""
    prefix = "model.language_model." if geometry.vision is not None else "model."
    shape = (geometry.vocab_size, geometry.hidden_size)
    yield Tensor(f"{prefix}embed_tokens.weight", shape, "embedding", True, "rows")
    for index in range(geometry.num_hidden_layers):
        layer = f"{prefix}layers.{index}."
        if geometry.is_attention(index):
            yield from _attention(geometry, layer, "body")
        else:
            yield from _recurrence(geometry, layer)
        yield from _mlp(geometry.hidden_size, geometry.intermediate_size, layer, "body")
    yield Tensor(f"{prefix}norm.weight", (geometry.hidden_size,), "body")
    if not geometry.tie_word_embeddings:
        yield Tensor("lm_head.weight", shape, "head", True, "rows")


def mtp_tensors(geometry: Geometry) -> Iterator[Tensor]:
    """The checkpoint's MTP head: a projection of embedding and hidden state, and attention layers like the model's."""
    hidden = geometry.hidden_size
    if geometry.mtp_num_hidden_layers == 0:
        return
    yield Tensor("mtp.fc.weight", (hidden, 2 * hidden), "mtp", True, "rows")
    for index in range(geometry.mtp_num_hidden_layers):
        yield from _attention(geometry, f"mtp.layers.{index}.", "mtp")
        yield from _mlp(hidden, geometry.intermediate_size, f"mtp.layers.{index}.", "mtp")
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        yield Tensor(f"mtp.{name}.weight", (hidden,), "mtp")


def draft_head_tensors(geometry: Geometry, scheme: Scheme) -> Iterator[Tensor]:
    """The MTP drafter's head over its own vocabulary, which preparation cuts out of lm_head."""
    if geometry.mtp_num_hidden_layers and scheme.draft_head_rows:
        rows = min(scheme.draft_head_rows, geometry.vocab_size)
        yield Tensor("mtp.draft_lm_head.weight", (rows, geometry.hidden_size), "draft head", True, "rows")


def vision_tensors(vision: Vision) -> Iterator[Tensor]:
    """The vision tower: patches, blocks, merger; all with biases, all bfloat16."""
    hidden, merged, prefix = vision.hidden_size, vision.merged_size, "model.visual."
    patch = (hidden, vision.in_channels, vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield Tensor(f"{prefix}patch_embed.proj.weight", patch, "vision")
    yield Tensor(f"{prefix}patch_embed.proj.bias", (hidden,), "vision")
    yield Tensor(f"{prefix}pos_embed.weight", (vision.num_position_embeddings, hidden), "vision")
    for index in range(vision.depth):
        block = f"{prefix}blocks.{index}."
        yield from _norm_with_bias(f"{block}norm1", hidden)
        yield from _norm_with_bias(f"{block}norm2", hidden)
        yield from _pair(f"{block}attn.qkv", f"{block}attn.proj", hidden, 3 * hidden, hidden)
        yield from _pair(
            f"{block}mlp.linear_fc1",
            f"{block}mlp.linear_fc2",
            hidden,
            vision.intermediate_size,
            vision.intermediate_size,
        )
    yield from _norm_with_bias(f"{prefix}merger.norm", hidden)
    yield from _pair(
        f"{prefix}merger.linear_fc1", f"{prefix}merger.linear_fc2", merged, merged, merged, vision.out_hidden_size
    )


def drafter_tensors(drafter: Drafter) -> Iterator[Tensor]:
    """A DFlash2 drafter. Convolutions, the selector and the projection of the hidden states are on every card."""
    hidden, head = drafter.hidden_size, drafter.head_dim
    queries, keys = drafter.num_attention_heads * head, drafter.num_key_value_heads * head
    kernel = 2 * drafter.conv_kernel_size * (hidden // drafter.conv_group_size)
    yield Tensor("fc.weight", (hidden, hidden * len(drafter.target_layer_ids)), "drafter", True)
    for index in range(drafter.num_hidden_layers):
        layer = f"layers.{index}."
        yield Tensor(f"{layer}self_attn.q_proj.weight", (queries, hidden), "drafter", True, "rows")
        for name in ("k_proj", "v_proj"):
            yield Tensor(f"{layer}self_attn.{name}.weight", (keys, hidden), "drafter", True, "key-value rows")
        yield Tensor(f"{layer}self_attn.o_proj.weight", (hidden, queries), "drafter", True, "columns")
        for name in ("q_norm", "k_norm"):
            yield Tensor(f"{layer}self_attn.{name}.weight", (head,), "drafter")
        yield from _mlp(hidden, drafter.intermediate_size, layer, "drafter")
        for name in ("attention_conv", "mlp_conv"):
            yield Tensor(f"{layer}{name}.base_kernel", (2, drafter.conv_kernel_size, hidden), "drafter")
            yield Tensor(f"{layer}{name}.kernel_projection.weight", (kernel, hidden), "drafter")
    for name in ("hidden_norm", "norm"):
        yield Tensor(f"{name}.weight", (hidden,), "drafter")
    for name in ("predecessor_codebook", "successor_codebook"):
        yield Tensor(f"candidate_selector.{name}", (drafter.vocab_size, drafter.selector_rank), "drafter")
    yield Tensor("candidate_selector.hidden_projection.weight", (drafter.selector_rank, hidden), "drafter")


def _attention(geometry: Geometry, layer: str, part: Part) -> Iterator[Tensor]:
    hidden, head = geometry.hidden_size, geometry.head_dim
    queries, keys = geometry.num_attention_heads * head, geometry.num_key_value_heads * head
    prefix = f"{layer}self_attn."
    # Query and output gate.
    yield Tensor(f"{prefix}q_proj.weight", (2 * queries, hidden), part, True, "rows")
    for name in ("k_proj", "v_proj"):
        yield Tensor(f"{prefix}{name}.weight", (keys, hidden), part, True, "key-value rows")
    yield Tensor(f"{prefix}o_proj.weight", (hidden, queries), part, True, "columns")
    for name in ("q_norm", "k_norm"):
        yield Tensor(f"{prefix}{name}.weight", (head,), part)


def _recurrence(geometry: Geometry, layer: str) -> Iterator[Tensor]:
    hidden, values, heads = geometry.hidden_size, geometry.value_dim, geometry.linear_num_value_heads
    prefix = f"{layer}linear_attn."
    yield Tensor(f"{prefix}in_proj_qkv.weight", (geometry.conv_dim, hidden), "body", True, "rows")
    yield Tensor(f"{prefix}in_proj_z.weight", (values, hidden), "body", True, "rows")
    yield Tensor(f"{prefix}out_proj.weight", (hidden, values), "body", True, "columns")
    for name in ("in_proj_b", "in_proj_a"):
        yield Tensor(f"{prefix}{name}.weight", (heads, hidden), "body", False, "rows")
    conv = (geometry.conv_dim, 1, geometry.linear_conv_kernel_dim)
    yield Tensor(f"{prefix}conv1d.weight", conv, "body", False, "first")
    for name in ("dt_bias", "A_log"):
        yield Tensor(f"{prefix}{name}", (heads,), "body", False, "first")
    yield Tensor(f"{prefix}norm.weight", (geometry.linear_value_head_dim,), "body")


def _mlp(hidden: int, intermediate: int, layer: str, part: Part) -> Iterator[Tensor]:
    for name in ("gate_proj", "up_proj"):
        yield Tensor(f"{layer}mlp.{name}.weight", (intermediate, hidden), part, True, "rows")
    yield Tensor(f"{layer}mlp.down_proj.weight", (hidden, intermediate), part, True, "columns")
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{layer}{name}.weight", (hidden,), part)


def _norm_with_bias(name: str, width: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "vision")
    yield Tensor(f"{name}.bias", (width,), "vision")


def _pair(first: str, second: str, width: int, rows: int, columns: int, output: int | None = None) -> Iterator[Tensor]:
    """Two linear layers with biases, the first cut by rows and the second by columns."""
    output = output or width
    yield Tensor(f"{first}.weight", (rows, width), "vision", False, "rows")
    yield Tensor(f"{first}.bias", (rows,), "vision", False, "first")
    yield Tensor(f"{second}.weight", (output, columns), "vision", False, "columns")
    yield Tensor(f"{second}.bias", (output,), "vision")


def checkpoint_tensors(geometry: Geometry, scheme: Scheme) -> Iterator[Tensor]:
    """A whole checkpoint of the target: text, MTP with its draft head, vision."""
    yield from text_tensors(geometry)
    yield from mtp_tensors(geometry)
    yield from draft_head_tensors(geometry, scheme)
    if geometry.vision is not None:
        yield from vision_tensors(geometry.vision)


# Bytes on a card --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """Bytes of loaded weights on each card by part, and those that are in host memory instead."""

    card: Mapping[Part, int]
    host: Mapping[Part, int]

    @property
    def card_bytes(self) -> int:
        return sum(self.card.values())

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())


def loaded_weights(
    geometry: Geometry,
    scheme: Scheme,
    *,
    mtp: bool = False,
    drafter: Drafter | None = None,
    vision: Placement = "off",
    embedding_in_host: bool = False,
    cards: int = 1,
) -> Weights:
    """What vLLM loads: text always, the MTP head for an MTP drafter only, the tower only with vision.

    An embedding that is also the head (tied) stays on the card. Raises BadInputError where the scheme cannot quantize
    a layer.
    """
    return _loaded(geometry, scheme, mtp, drafter, vision, embedding_in_host, cards)


@cache  # a planner asks for the same weights once for every context that it tries
def _loaded(
    geometry: Geometry,
    scheme: Scheme,
    mtp: bool,
    drafter: Drafter | None,
    vision: Placement,
    embedding_in_host: bool,
    cards: int,
) -> Weights:
    chosen = list(text_tensors(geometry))
    if mtp:
        chosen += [*mtp_tensors(geometry), *draft_head_tensors(geometry, scheme)]
    if vision != "off" and geometry.vision is not None:
        chosen += vision_tensors(geometry.vision)
    off_card: set[Part] = set()
    if embedding_in_host and not geometry.tie_word_embeddings:
        off_card.add("embedding")
    if vision == "host":
        off_card.add("vision")
    sizes = [(tensor.part, tensor.on_card(scheme, cards, geometry.num_key_value_heads)) for tensor in chosen]
    if drafter is not None:
        heads = drafter.num_key_value_heads
        sizes += [(tensor.part, tensor.on_card(scheme, cards, heads)) for tensor in drafter_tensors(drafter)]
    card: dict[Part, int] = {}
    host: dict[Part, int] = {}
    for part, size in sizes:
        where = host if part in off_card else card
        where[part] = where.get(part, 0) + size
    return Weights(MappingProxyType(card), MappingProxyType(host))
