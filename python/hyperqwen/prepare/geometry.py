"""The shape of a model: numbers from prepare/models/NAME.toml or from a config.json, for any size of the family.

The family is Qwen3.5's dense hybrid: layers that are Gated DeltaNet but for every n-th, which is full attention with
an output gate. Anything else (experts, biases, another mixer) is refused. Needs the standard library only, because
the engine's Python reads it too.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

from hyperqwen import share
from hyperqwen.errors import BadInputError, MissingError

ARCHITECTURES = ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM")
DRAFTER_ARCHITECTURE = "DFlash2DraftModel"
_FULL, _LINEAR = "full_attention", "linear_attention"

_MOST_LAYERS = 1024
# Far above any model: what is beyond is a mistake, and would be computed with for minutes.
_MOST = {
    "num_hidden_layers": _MOST_LAYERS,
    "mtp_num_hidden_layers": _MOST_LAYERS,
    "depth": _MOST_LAYERS,
    "vocab_size": 1 << 22,
    "intermediate_size": 1 << 20,
    "max_position_embeddings": 1 << 24,
    "num_position_embeddings": 1 << 24,
    "sliding_window": 1 << 24,
}
_MOST_OTHERS = 1 << 17

CARDS_LIMIT = 8
"""Most cards that share a layer."""

GROUP = 128
"""Input columns that share a scale of a quantized linear layer."""

VOCABULARY_MULTIPLE = 64
"""vLLM pads embedding and head to a multiple of this before it splits them (VocabParallelEmbedding)."""


@dataclass(frozen=True)
class Vision:
    """The vision tower: fields of config.json's `vision_config`."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_position_embeddings: int
    out_hidden_size: int
    in_channels: int = 3

    @property
    def merged_size(self) -> int:
        """Width of the patches that the merger joins into one token."""
        return self.hidden_size * self.spatial_merge_size**2


@dataclass(frozen=True)
class Geometry:
    """A target model. Counts are of the whole model; what one of several cards holds says so."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    full_attention_interval: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    max_position_embeddings: int
    mtp_num_hidden_layers: int = 0
    tie_word_embeddings: bool = False
    vision: Vision | None = None

    @property
    def attention_layers(self) -> int:
        """Full-attention layers: i with (i + 1) % full_attention_interval == 0."""
        return self.num_hidden_layers // self.full_attention_interval

    @property
    def recurrent_layers(self) -> int:
        """Gated DeltaNet layers."""
        return self.num_hidden_layers - self.attention_layers

    def is_attention(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def key_dim(self) -> int:
        """Width of a Gated DeltaNet layer's queries, and of its keys."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the causal convolution: queries, keys and values."""
        return 2 * self.key_dim + self.value_dim

    @property
    def queries_per_key(self) -> int:
        """Query heads that share a key head (G)."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


@dataclass(frozen=True)
class Drafter:
    """A DFlash2 drafter. It has no embedding and no head of its own: it uses the target's."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int


# Reading ----------------------------------------------------------------------------------------------------------


def load(name_or_path: str | Path) -> Geometry:
    """The geometry that a name ("qwen3.8-27b": a file of prepare/models), a .toml or a config.json describes.

    Raises MissingError (no such file; a name close to the one given is named) and BadInputError (every field that is
    wrong).
    """
    path = _find(name_or_path)
    content = _content(path, "geometry")
    if path.suffix == ".json":
        return from_config(content, path.resolve().parent.name, str(path))
    return from_table(content, path.stem, str(path))


def load_drafter(name_or_path: str | Path) -> Drafter:
    """The same for a DFlash2 drafter ("qwen3.8-27b-dflash2")."""
    path = _find(name_or_path)
    content = _content(path, "drafter")
    if path.suffix == ".json":
        return drafter_from_config(content, path.resolve().parent.name, str(path))
    return drafter_from_table(content, path.stem, str(path))


def names() -> tuple[str, ...]:
    """Names of the geometries in prepare/models, drafters left out."""
    found = []
    for path in sorted(share.folder("models").glob("*.toml")):
        if "geometry" in _toml(path):
            found.append(path.stem)
    return tuple(found)


def from_table(table: Mapping[str, Any], name: str, where: str) -> Geometry:
    """The geometry in a [geometry] table; `where` names its file in messages."""
    problems = _Problems(where)
    values = dict(table)
    architecture = values.pop("architecture", None)
    if architecture not in ARCHITECTURES:
        problems.add("geometry.architecture", architecture, f"must be {' or '.join(ARCHITECTURES)}")
    vision = values.pop("vision", None)
    known = {
        **problems.fields(Geometry, values, "geometry.", skip=("name", "vision"), closed=True),
        "vision": None if vision is None else problems.table(Vision, vision, "geometry.vision.", closed=True),
    }
    problems.finish()
    return _checked(Geometry(name=name, **known), where, "geometry.")


def from_config(config: Mapping[str, Any], name: str, where: str) -> Geometry:
    """The geometry in a Hugging Face config.json, with the text model's fields under `text_config` or at the top."""
    problems = _Problems(where)
    architecture = _architecture(config)
    if architecture not in ARCHITECTURES:
        problems.add("architectures", architecture, f"must be {' or '.join(ARCHITECTURES)}")
        problems.finish()
    prefix = "text_config." if "text_config" in config else ""
    text: Mapping[str, Any] = config.get("text_config", config)
    if not isinstance(text, Mapping):
        problems.add("text_config", text, "must be a table")
        problems.finish()
    for field, wanted in (("attention_bias", False), ("attn_output_gate", True), ("hidden_act", "silu")):
        if text.get(field, wanted) != wanted:
            problems.add(prefix + field, text[field], f"must be {wanted!r}: this family has nothing else")
    if text.get("num_experts"):
        problems.add(prefix + "num_experts", text["num_experts"], "must be absent: the planner knows dense models")
    values = {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}
    kinds = text.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        problems.add(prefix + "layer_types", kinds, "must be a list")
        problems.finish()
    if "full_attention_interval" not in values:
        # transformers derives the kinds of the layers from it, and has 4 where it is not said.
        values["full_attention_interval"] = 1 + kinds.index(_FULL) if kinds and _FULL in kinds else 4
    known = problems.fields(Geometry, values, prefix, skip=("name", "vision"))
    vision = config.get("vision_config") if architecture == ARCHITECTURES[0] else None
    known["vision"] = None if vision is None else problems.table(Vision, vision, "vision_config.")
    problems.finish()
    geometry = _checked(Geometry(name=name, **known), where, prefix)
    expected = [_FULL if geometry.is_attention(i) else _LINEAR for i in range(geometry.num_hidden_layers)]
    if kinds is not None and kinds != expected:
        problems.add(
            prefix + "layer_types",
            kinds,
            f"must be {geometry.num_hidden_layers} kinds (num_hidden_layers): {_FULL} at every "
            f"{geometry.full_attention_interval}th (full_attention_interval) and {_LINEAR} elsewhere",
        )
    problems.finish()
    return geometry


def _architecture(config: Mapping[str, Any]) -> Any:
    named = config.get("architectures")
    return named[0] if isinstance(named, list) and named else named or None


def drafter_from_table(table: Mapping[str, Any], name: str, where: str) -> Drafter:
    """The drafter in a [drafter] table."""
    problems = _Problems(where)
    values = dict(table)
    architecture = values.pop("architecture", None)
    if architecture != DRAFTER_ARCHITECTURE:
        problems.add("drafter.architecture", architecture, f"must be {DRAFTER_ARCHITECTURE}")
    known = problems.fields(Drafter, values, "drafter.", skip=("name",), closed=True)
    problems.finish()
    return _checked_drafter(Drafter(name=name, **known), where, "drafter.")


def drafter_from_config(config: Mapping[str, Any], name: str, where: str) -> Drafter:
    """The drafter in a DFlash2 checkpoint's config.json; the fields of `dflash_config` are read beside the rest."""
    problems = _Problems(where)
    architecture = _architecture(config)
    if architecture != DRAFTER_ARCHITECTURE:
        problems.add("architectures", architecture, f"must be {DRAFTER_ARCHITECTURE}")
        problems.finish()
    inner = config.get("dflash_config") or {}
    if not isinstance(inner, Mapping):
        problems.add("dflash_config", inner, "must be a table")
        problems.finish()
    values = {**config, **inner}
    if "swa_window_size" in inner:
        values["sliding_window"] = inner["swa_window_size"]
    known = problems.fields(Drafter, values, "", skip=("name",))
    problems.finish()
    return _checked_drafter(Drafter(name=name, **known), where, "")


def _content(path: Path, table: str) -> dict[str, Any]:
    """What a config.json holds, or the table of that name in a .toml."""
    if path.suffix == ".json":
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except RecursionError:
            raise BadInputError(f"{path} is nested too deeply", "name the model's config.json") from None
        except ValueError as error:
            raise BadInputError(f"{path} is not JSON: {error}", "name the model's config.json") from None
        if not isinstance(config, dict):
            raise BadInputError(f"{path} holds no object", "name the model's config.json")
        return config
    found = _toml(path).get(table)
    if not isinstance(found, dict):
        raise BadInputError(f"{path} has no table [{table}]", f"add [{table}], or name another file")
    return found


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise BadInputError(f"{path} is nested too deeply", "take arrays or tables out") from None
    except ValueError as error:
        raise BadInputError(f"{path} is not TOML: {error}", "correct that line") from None


def _find(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if "/" in text or text.endswith((".toml", ".json")):
        path = Path(text)
        if path.is_dir():
            path = path / "config.json"
        if path.is_file():
            return path
        raise MissingError(f"{path} does not exist", "name a file of prepare/models, or a config.json")
    folder = share.folder("models")
    path = folder / f"{text}.toml"
    if path.is_file():
        return path
    known = sorted(file.stem for file in folder.glob("*.toml"))
    close = difflib.get_close_matches(text, known, n=1, cutoff=0.4)
    fix = f"did you mean {close[0]}?" if close else f"use one of {', '.join(known)}, or the path of a config.json"
    raise MissingError(f"model {text!r}: there is no {path}", fix)


def _shown(value: Any) -> str:
    # Python prints no number of thousands of digits.
    return "too large" if isinstance(value, int) and value.bit_length() > 256 else repr(value)


class _Problems:
    """Collects what is wrong with the fields of one file, and raises it as one error."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._lines: list[str] = []

    def add(self, field: str, value: Any, rule: str) -> None:
        self._lines.append(
            f"{field} is {_shown(value)}; it {rule}" if value is not None else f"{field} is missing; it {rule}"
        )

    def finish(self) -> None:
        if len(self._lines) == 1:
            raise BadInputError(f"{self._where}: {self._lines[0]}")
        if self._lines:
            listed = "".join(f"\n  {line}" for line in self._lines)
            raise BadInputError(f"{len(self._lines)} problems in {self._where}:{listed}")

    def table(self, model: type[Vision], values: Any, prefix: str, closed: bool = False) -> Vision | None:
        if not isinstance(values, Mapping):
            self.add(prefix.rstrip("."), values, "must be a table")
            return None
        before = len(self._lines)
        known = self.fields(model, values, prefix, closed=closed)
        return model(**known) if len(self._lines) == before else None

    def fields(
        self, model: Any, values: Mapping[str, Any], prefix: str, skip: Sequence[str] = (), closed: bool = False
    ) -> dict[str, Any]:
        """The values of the fields of `model`, by name; `closed`: whether other keys are problems."""
        kinds = {field.name: field for field in fields(model) if field.name not in skip}
        for key in sorted(set(values) - set(kinds)) if closed else ():
            close = difflib.get_close_matches(key, list(kinds), n=1, cutoff=0.5)
            self._lines.append(
                f"{prefix}{key} is not a field; " + (f"did you mean {close[0]}?" if close else "remove it")
            )
        found: dict[str, Any] = {}
        for key, field in kinds.items():
            value = values.get(key)
            if value is None and field.default is not MISSING:
                found[key] = field.default
            elif field.type == "bool":
                if not isinstance(value, bool):
                    self.add(prefix + key, value, "must be true or false")
                found[key] = value
            elif field.type == "tuple[int, ...]":
                found[key] = self._integers(prefix + key, value)
            else:
                least = 0 if key == "mtp_num_hidden_layers" else 1
                most = _MOST.get(key, _MOST_OTHERS)
                if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                    self.add(prefix + key, value, f"must be a whole number from {least} to {most}")
                found[key] = value
        return found

    def _integers(self, field: str, value: Any) -> tuple[int, ...]:
        if (
            isinstance(value, list)
            and value
            and all(isinstance(item, int) and 0 <= item < _MOST_LAYERS for item in value)
        ):
            return tuple(value)
        self.add(field, value, "must be a list of layer indices")
        return ()


def _checked(geometry: Geometry, where: str, prefix: str) -> Geometry:
    problems = _Problems(where)
    for whole, part in (
        ("num_attention_heads", "num_key_value_heads"),
        ("linear_num_value_heads", "linear_num_key_heads"),
    ):
        value, divisor = getattr(geometry, whole), getattr(geometry, part)
        if value % divisor:
            problems.add(prefix + whole, value, f"must be a multiple of {part} = {divisor}")
    if geometry.full_attention_interval < 2 or geometry.attention_layers == 0:
        problems.add(
            prefix + "full_attention_interval",
            geometry.full_attention_interval,
            f"must be from 2 to num_hidden_layers = {geometry.num_hidden_layers}: the family mixes both kinds of layer",
        )
    problems.finish()
    return geometry


def _checked_drafter(drafter: Drafter, where: str, prefix: str) -> Drafter:
    problems = _Problems(where)
    for whole, part in (("num_attention_heads", "num_key_value_heads"), ("hidden_size", "conv_group_size")):
        value, divisor = getattr(drafter, whole), getattr(drafter, part)
        if value % divisor:
            problems.add(prefix + whole, value, f"must be a multiple of {part} = {divisor}")
    problems.finish()
    return drafter


# Several cards ----------------------------------------------------------------------------------------------------


def check_tensor_parallel(
    geometry: Geometry, cards: int, *, drafter: Drafter | None = None, quantized: bool = True, vision: bool = False
) -> None:
    """Raise BadInputError where `cards` cards cannot share the layers, naming the field and the nearest number that
    works.

    Query heads, key heads of the recurrence, intermediate size and vocabulary are cut into equal parts. Key-value
    heads are cut, or repeated where there are fewer than cards. A quantized layer whose input is cut needs whole
    groups of 128 columns on every card.
    """
    problem = _undivided(geometry, cards, drafter, quantized, vision)
    if problem is None:
        return
    working = [n for n in range(1, CARDS_LIMIT + 1) if _undivided(geometry, n, drafter, quantized, vision) is None]
    nearest = min(working, key=lambda n: (abs(n - cards), n))
    raise BadInputError(
        f"parallel.tensor is {cards}, but {problem}", f"use {nearest} (what works: {', '.join(map(str, working))})"
    )


def _undivided(geometry: Geometry, cards: int, drafter: Drafter | None, quantized: bool, vision: bool) -> str | None:
    if not 1 <= cards <= CARDS_LIMIT:
        return f"it must be from 1 to {CARDS_LIMIT}"
    name = geometry.name
    equal = {
        "num_attention_heads": geometry.num_attention_heads,
        "linear_num_key_heads": geometry.linear_num_key_heads,
        "linear_num_value_heads": geometry.linear_num_value_heads,
        "intermediate_size": geometry.intermediate_size,
        "padded vocab_size": geometry.padded_vocab_size,
    }
    shared = {"num_key_value_heads": geometry.num_key_value_heads}
    inputs = {
        "intermediate_size": geometry.intermediate_size,
        "num_attention_heads x head_dim": geometry.num_attention_heads * geometry.head_dim,
        "linear_num_value_heads x linear_value_head_dim": geometry.value_dim,
    }
    if vision and geometry.vision is not None:
        equal["vision.num_heads"] = geometry.vision.num_heads
        equal["vision.intermediate_size"] = geometry.vision.intermediate_size
    if drafter is not None:
        equal["the drafter's num_attention_heads"] = drafter.num_attention_heads
        equal["the drafter's intermediate_size"] = drafter.intermediate_size
        shared["the drafter's num_key_value_heads"] = drafter.num_key_value_heads
        inputs["the drafter's intermediate_size"] = drafter.intermediate_size
        inputs["the drafter's num_attention_heads x head_dim"] = drafter.num_attention_heads * drafter.head_dim
    for field, value in shared.items():
        if value % cards and cards % value:
            return f"{field} of {name} is {value}, which {cards} cards can neither share nor repeat"
    for field, value in equal.items():
        if value % cards:
            return f"{field} of {name} is {value}, which is not a multiple of {cards}"
    for field, value in inputs.items() if quantized and cards > 1 else ():
        if value % (cards * GROUP):
            return f"{field} of {name} is {value}, of which a card would hold no whole groups of {GROUP}"
    return None


def key_value_heads(heads: int, cards: int) -> int:
    """Key-value heads on each card: equal parts, or one that several cards repeat."""
    return max(1, heads // cards)
