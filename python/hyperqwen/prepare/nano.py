"""Build nano, the checkpoint that ships with the repository: real architecture, a few MB, constructed from a
seed.

    python -m hyperqwen.prepare.nano --config prepare/nano.toml --out DIR

How it is constructed (docs/nano.md explains what follows from it):

* The text of `cycles.toml` is cut into tokens, each of which stands there once. Reading every cycle as a ring
  gives a permutation of those tokens. A token of no cycle is an *alias* of one that is: same successor.
* The embeddings of the permuted tokens are nearly orthogonal, an alias lies close to its original, and the
  output row of the successor of t is the embedding of t divided by 4. With the layers silent, the model would
  be a look-up table.
* Every layer has random weights and adds to the residual stream a vector that depends on the whole context.
  It is small enough that the successor stays the most likely token, by a margin.
* The MTP head passes the embedding on in the same way, with noise so large that it is wrong now and then.

Every byte is the same on every machine. Random numbers are SHAKE-256 output, which no library version
changes; arithmetic is integer, or single IEEE operations on float64 with one explicit rounding to bfloat16;
nothing that decides a weight goes through BLAS or libm.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tokenizers import Tokenizer

from hyperqwen.errors import BadInputError, HyperqwenError, UnsuitableError
from hyperqwen.prepare import bpe, chat, quantize, tensors, truth
from hyperqwen.prepare.truth import Truth

__all__ = ["Config", "Truth", "build", "load_config"]

Embedding = Literal["bf16", "int8"]
Model = TypeVar("Model", bound=BaseModel)

_CONTROL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
_TAGS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)
SPECIALS = tuple(bpe.Special(text, control=text in _CONTROL) for text in (*_CONTROL, *_TAGS))
"""Qwen's special tokens in Qwen's order; they follow the vocabulary, as there."""

END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"

HEAD_SCALE = 1 / 4
"""Output row = embedding * this. A power of two, so that the two stay equal bit for bit."""

_GRID = 111
"""Embedding entries are k / 64 with |k| <= 111: root mean square 1, and exact in bfloat16."""

_QUIET = 1 / 16
"""Root mean square of the output rows of tokens that are never predicted, before `HEAD_SCALE`."""

_SHARPNESS = 2.0
"""Mean of the query norm's factor: attention that looks at few positions does not average their values
away."""

_MLP_LEVEL, _GDN_LEVEL, _ATTENTION_LEVEL = 0.6, 0.53, 0.4
"""Root mean square of what reaches an output projection, measured on this construction.

They turn `layer_noise` into what a layer really adds; test_prepare_nano.py holds them to it.
"""

_VOCAB_MULTIPLE = 64
_ANSWER_TOKENS, _CHAT_TOKENS = 32, 4096
"""Length of the greedy answers in nano.json: to a completion, which nothing ends, and at most to a chat."""

_CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes of vLLM's CPU attention."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Files(_Strict):
    """Paths relative to the configuration file."""

    cycles: str
    prompts: str
    template: str


class TokenizerConfig(_Strict):
    """`limit` bounds the vocabulary; `words` are single tokens beside those of the cycles."""

    limit: int = Field(ge=512, le=65536)
    words: tuple[str, ...] = Field(strict=False)


class Geometry(_Strict):
    """The fields of config.json that give tensors their shape, under the same names."""

    hidden_size: int = Field(gt=0, multiple_of=quantize.GROUP)
    intermediate_size: int = Field(gt=0, multiple_of=32)
    num_hidden_layers: int = Field(gt=0)
    full_attention_interval: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int
    linear_num_key_heads: int = Field(gt=0)
    linear_num_value_heads: int = Field(gt=0)
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = Field(ge=2, le=8)
    max_position_embeddings: int = Field(gt=0)

    @model_validator(mode="after")
    def _divides(self) -> Geometry:
        for whole, part in (
            ("num_hidden_layers", "full_attention_interval"),
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"{whole} = {getattr(self, whole)} is not a multiple of {part} = {getattr(self, part)}"
                )
        if self.head_dim not in _CPU_HEAD_SIZES:
            raise ValueError(f"head_dim = {self.head_dim} is none of {', '.join(map(str, _CPU_HEAD_SIZES))}")
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            if getattr(self, name) != 128:
                raise ValueError(f"{name} = {getattr(self, name)}: the CPU's Gated-DeltaNet kernels are made for 128")
        return self

    def layer_types(self) -> list[str]:
        """`full_attention` for every `full_attention_interval`-th layer, else `linear_attention`."""
        every = self.full_attention_interval
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(self.num_hidden_layers)]


class Construction(_Strict):
    """How clear the successors are and how loud the layers."""

    coherence: float = Field(ge=0.15, lt=1)
    alias_spread: float = Field(ge=0, lt=1)
    layer_noise: float = Field(ge=0, le=2)
    draft_noise: float = Field(ge=0, le=8)


class Sampling(_Strict):
    """Defaults for generation_config.json."""

    temperature: float = Field(ge=0, le=2)


class Config(_Strict):
    """prepare/nano.toml."""

    name: str = Field(min_length=1)
    seed: int = Field(ge=0)
    embedding: Embedding
    files: Files
    tokenizer: TokenizerConfig
    geometry: Geometry
    construction: Construction
    sampling: Sampling


class CycleText(_Strict):
    """One `[[cycle]]` of cycles.toml."""

    name: str = Field(min_length=1)
    text: str = Field(min_length=1)
    opening: bool = False


class _Cycles(_Strict):
    cycle: tuple[CycleText, ...] = Field(strict=False, min_length=1)


class Completion(_Strict):
    """A prompt as it is, without template."""

    name: str
    prompt: str = Field(min_length=1)


class Chat(_Strict):
    """A conversation that goes through the chat template."""

    name: str
    thinking: bool
    messages: tuple[dict[str, str], ...] = Field(strict=False, min_length=1)


class _Prompts(_Strict):
    completion: tuple[Completion, ...] = Field(strict=False)
    chat: tuple[Chat, ...] = Field(strict=False)


def load_config(path: Path, embedding: Embedding | None = None) -> Config:
    """The configuration at `path`, with another `embedding` where one is given.

    Raises BadInputError that names the field, its value and what it must be.
    """
    config = _parse(Config, path)
    return config.model_copy(update={"embedding": embedding}) if embedding else config


def build(config: Config, base: Path, out: Path) -> Truth:
    """Write the model directory `out`; `base` is the folder that the configuration's files are relative to.

    Everything is made in memory and written to a folder beside `out` that takes its name at the end, so that
    `out` is whole or absent. Raises BadInputError where `out` exists or an input is wrong, UnsuitableError
    where writing fails.
    """
    if os.path.lexists(out):
        raise BadInputError(f"{out} exists already", "remove it, or give another --out")
    if not out.absolute().parent.is_dir():
        raise BadInputError(f"{out.absolute().parent} is not a folder", "make it first, or give another --out")
    texts = _parse(_Cycles, base / config.files.cycles).cycle
    prompts = _parse(_Prompts, base / config.files.prompts)
    template = _read(base / config.files.template)
    vocabulary = make_vocabulary(texts, config.tokenizer)
    tokenizer = bpe.tokenizer(vocabulary)
    rings = make_rings(texts, tokenizer)
    table = Successors.make(vocabulary, texts, rings, config.seed)
    contents = {
        "chat_template.jinja": template.encode(),
        "config.json": _json(model_config(config, vocabulary)),
        "generation_config.json": _json(generation_config(config, vocabulary)),
        "model.safetensors": tensors.encode(weights(config, table)),
        "tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(),
        "tokenizer_config.json": _json(tokenizer_config(config)),
    }
    facts: dict[str, Any] = {
        "schema": truth.SCHEMA,
        "name": config.name,
        "seed": config.seed,
        "embedding": config.embedding,
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()},
        "stop_ids": [vocabulary.ids()[token] for token in (END_OF_TURN, END_OF_TEXT)],
        "cycles": [{"name": ring.name, "ids": list(ring.ids), "text": ring.text} for ring in rings],
        "next": table.successor.tolist(),
        "prompts": [],
    }
    known = Truth(tuple(facts["next"]), tuple(rings), frozenset(facts["stop_ids"]), (), facts["files"])
    facts["prompts"] = [_with_answer(case, count, template, tokenizer, known) for case, count in _cases(prompts, rings)]
    contents[truth.FILE] = _json(facts)
    _write(out, contents)
    return Truth.load(out)


def make_vocabulary(texts: Sequence[CycleText], config: TokenizerConfig) -> bpe.Vocabulary:
    """A vocabulary in which each word of the cycles is one token, and one more where it stands without its
    space."""
    words: set[str] = {bpe.to_units(word) for word in config.words}
    for text in texts:
        for part in _without_specials(text.text):
            words.update(bpe.split_words(part))
    space = bpe.to_units(" ")
    words |= {word[1:] for word in words if len(word) > 1 and word.startswith(space) and word[1:].isalpha()}
    return bpe.train(words, SPECIALS, config.limit)


def make_rings(texts: Sequence[CycleText], tokenizer: Tokenizer) -> list[truth.Cycle]:
    """The cycles as token ids.

    Raises BadInputError that names every token which stands twice, and every cycle that would read otherwise
    when it follows itself.
    """
    problems: list[str] = []
    rings: list[truth.Cycle] = []
    home: dict[int, str] = {}
    for text in texts:
        ids = tokenizer.encode(text.text).ids
        if tokenizer.encode(text.text * 2).ids != ids * 2:
            problems.append(f"cycle {text.name}: its end and its start fuse into other tokens")
        for token in ids:
            if token in home:
                problems.append(
                    f"{tokenizer.id_to_token(token)!r} stands in cycle {home[token]} and again in {text.name}"
                )
            home[token] = text.name
        rings.append(truth.Cycle(text.name, tuple(ids), text.text))
    if not any(text.opening for text in texts):
        problems.append("no cycle has opening = true, so a prompt that ends in an unknown word could not go on")
    if END_OF_TURN not in {tokenizer.id_to_token(token) for token in home}:
        problems.append(f"no cycle holds {END_OF_TURN}, so no answer would ever end")
    if problems:
        raise BadInputError("cycles.toml:\n  " + "\n  ".join(problems), "reword the cycles")
    return rings


@dataclass(frozen=True)
class Successors:
    """The successor of every token.

    `original` [tokens]: the token of a cycle whose place a token takes, itself for the tokens of cycles.
    `successor` [tokens]: the token that follows. `ringed`: the ids of all cycles, ascending.
    """

    original: NDArray[np.int64]
    successor: NDArray[np.int64]
    ringed: NDArray[np.int64]

    @classmethod
    def make(
        cls, vocabulary: bpe.Vocabulary, texts: Sequence[CycleText], rings: Sequence[truth.Cycle], seed: int
    ) -> Successors:
        """Rings give the permutation. A special token outside takes the place of `<|im_end|>`, whose
        successor is the line break that starts an answer; so does a role, which the template has a line break
        after. A word takes the place of the same word with a space before it, and everything else that of
        some opening cycle's end.
        """
        ids = vocabulary.ids()
        follows = {a: b for ring in rings for a, b in zip(ring.ids, ring.ids[1:] + ring.ids[:1], strict=True)}
        ends = [ring.ids[-1] for ring, text in zip(rings, texts, strict=True) if text.opening]
        picks = below(draws(seed, "alias", len(ids)), len(ends))
        special = {s.content for s in SPECIALS}
        roles = {"system", "user", "assistant"}
        space = bpe.to_units(" ")
        original = np.empty(len(ids), np.int64)
        for spelling, token in ids.items():
            spaced = ids.get(space + spelling)
            if token in follows:
                original[token] = token
            elif spelling in special or spelling in roles:
                original[token] = ids[END_OF_TURN]
            elif spaced in follows:
                original[token] = spaced
            else:
                original[token] = ends[picks[token]]
        successor = np.array([follows[int(token)] for token in original], np.int64)
        return cls(original, successor, np.array(sorted(follows), np.int64))


def draws(seed: int, name: str, count: int) -> NDArray[np.int64]:
    """`count` integers in 0..65535 of the stream `name`; streams do not depend on each other."""
    raw = hashlib.shake_256(f"hyperqwen nano {seed} {name}".encode()).digest(2 * count)
    return np.frombuffer(raw, "<u2").astype(np.int64)


def below(sixteen_bits: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Integers in 0..65535 scaled down to 0..limit - 1."""
    return (sixteen_bits * limit) >> 16


def uniform(seed: int, name: str, shape: Sequence[int], low: float, high: float) -> NDArray[np.float64]:
    """Numbers evenly spread between `low` and `high`, which are not reached."""
    unit = (2 * draws(seed, name, math.prod(shape)) + 1) / 131072
    return (low + unit * (high - low)).reshape(shape)


def spread(seed: int, name: str, shape: Sequence[int], deviation: float) -> NDArray[np.float64]:
    """Numbers evenly spread around 0 with the standard deviation given."""
    reach = math.sqrt(3) * deviation
    return uniform(seed, name, shape, -reach, reach)


def codes(seed: int, count: int, width: int, coherence: float) -> NDArray[np.int64]:
    """`count` integer vectors of `width` in the embedding grid, no two with a cosine above `coherence`.

    Candidates are drawn until enough of them keep their distance; all of it in integers.
    Raises BadInputError where that does not come about.
    """
    kept = np.zeros((count, width), np.int64)
    lengths = np.zeros(count, np.int64)
    found = 0
    for attempt in range(200 * count):
        vector = below(draws(seed, f"embedding {attempt}", width), 2 * _GRID + 1) - _GRID
        length = int(vector @ vector)
        products = kept[:found] @ vector
        # Both sides of cos <= coherence squared: an exact integer against a product of float64.
        close = (products > 0) & (products**2 > coherence * coherence * (lengths[:found] * length))
        if not close.any():
            kept[found], lengths[found] = vector, length
            found += 1
            if found == count:
                return kept
    raise BadInputError(
        f"construction.coherence = {coherence}: found only {found} of {count} embeddings that far apart",
        "raise coherence, or hidden_size",
    )


def weights(config: Config, table: Successors) -> dict[str, tensors.Array]:
    """Every tensor of the checkpoint by name."""
    g, c = config.geometry, config.construction
    hidden = g.hidden_size
    made: dict[str, tensors.Array] = {}

    def put(name: str, values: NDArray[np.float64]) -> None:
        made[name] = tensors.to_bf16(values)

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """A projection that maps inputs of root mean square 1 to outputs of root mean square `gain`."""
        put(name + ".weight", spread(config.seed, name, (rows, columns), gain / math.sqrt(columns)))

    def norm(name: str, size: int, center: float = 0.0) -> None:
        put(name + ".weight", center + uniform(config.seed, name, (size,), -1 / 8, 1 / 8))

    def block(prefix: str, kind: str, noise: float) -> None:
        norm(prefix + "input_layernorm", hidden)
        norm(prefix + "post_attention_layernorm", hidden)
        if kind == "full_attention":
            attention(prefix + "self_attn.", noise)
        else:
            gated_delta_net(prefix + "linear_attn.", noise)
        linear(prefix + "mlp.gate_proj", g.intermediate_size, hidden)
        linear(prefix + "mlp.up_proj", g.intermediate_size, hidden)
        linear(prefix + "mlp.down_proj", hidden, g.intermediate_size, noise / _MLP_LEVEL)

    def attention(prefix: str, noise: float) -> None:
        queries, shared = g.num_attention_heads * g.head_dim, g.num_key_value_heads * g.head_dim
        linear(prefix + "q_proj", 2 * queries, hidden)
        linear(prefix + "k_proj", shared, hidden)
        linear(prefix + "v_proj", shared, hidden)
        linear(prefix + "o_proj", hidden, queries, noise / _ATTENTION_LEVEL)
        norm(prefix + "q_norm", g.head_dim, _SHARPNESS - 1)
        norm(prefix + "k_norm", g.head_dim)

    def gated_delta_net(prefix: str, noise: float) -> None:
        keys, values = (
            g.linear_num_key_heads * g.linear_key_head_dim,
            g.linear_num_value_heads * g.linear_value_head_dim,
        )
        channels = 2 * keys + values
        linear(prefix + "in_proj_qkv", channels, hidden)
        linear(prefix + "in_proj_z", values, hidden)
        linear(prefix + "in_proj_a", g.linear_num_value_heads, hidden)
        linear(prefix + "in_proj_b", g.linear_num_value_heads, hidden)
        taps = g.linear_conv_kernel_dim
        put(
            prefix + "conv1d.weight",
            spread(config.seed, prefix + "conv1d", (channels, 1, taps), 1 / math.sqrt(taps)),
        )
        # A head keeps its state for about 1 / (1.3 e^A_log) tokens: from under one to a hundred and more.
        put(prefix + "A_log", uniform(config.seed, prefix + "A_log", (g.linear_num_value_heads,), -5.0, 0.5))
        put(
            prefix + "dt_bias",
            uniform(config.seed, prefix + "dt_bias", (g.linear_num_value_heads,), 0.5, 1.5),
        )
        norm(prefix + "norm", g.linear_value_head_dim, 1.0)
        linear(prefix + "out_proj", hidden, values, noise / _GDN_LEVEL)

    embedding, head = _embedding_and_head(config, table)
    put("model.embed_tokens.weight", embedding)
    if config.embedding == "int8":
        # From the rounded weights, as any quantizer of the bfloat16 checkpoint would have them.
        rounded = tensors.from_bf16(made.pop("model.embed_tokens.weight"))
        made |= quantize.tensors("model.embed_tokens", rounded)
    put("lm_head.weight", head)
    for index, kind in enumerate(g.layer_types()):
        block(f"model.layers.{index}.", kind, c.layer_noise)
    norm("model.norm", hidden)
    block("mtp.layers.0.", "full_attention", c.draft_noise)
    for name in ("mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"):
        norm(name, hidden)
    from_hidden = spread(config.seed, "mtp.fc", (hidden, hidden), c.draft_noise / math.sqrt(hidden))
    put("mtp.fc.weight", np.concatenate([np.eye(hidden), from_hidden], axis=1))
    return made


def _embedding_and_head(config: Config, table: Successors) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Embedding and output rows [vocabulary padded, hidden], exact in bfloat16 but for the aliases."""
    tokens, hidden, spreading = (
        len(table.original),
        config.geometry.hidden_size,
        config.construction.alias_spread,
    )
    padded = -(-tokens // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
    embedding = np.zeros((padded, hidden))
    embedding[table.ringed] = codes(config.seed, len(table.ringed), hidden, config.construction.coherence) / 64
    own = spread(config.seed, "alias embedding", (tokens, hidden), spreading)
    near = math.sqrt(1 - spreading * spreading) * embedding[table.original] + own
    aliases = np.flatnonzero(table.original != np.arange(tokens))
    embedding[aliases] = near[aliases]
    head = np.zeros((padded, hidden))
    head[:tokens] = spread(config.seed, "quiet rows", (tokens, hidden), _QUIET)
    head[table.successor[table.ringed]] = embedding[table.ringed]
    return embedding, head * HEAD_SCALE


def model_config(config: Config, vocabulary: bpe.Vocabulary) -> dict[str, Any]:
    """config.json.

    Every field is given, because the defaults of the configuration class are another model's.
    `rope_parameters` has no mrope fields: with them vLLM 0.31.0 hands the drafter of a text-only model
    positions of the wrong shape.
    """
    ids = vocabulary.ids()
    result: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": -(-len(vocabulary) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE,
        **config.geometry.model_dump(),
        "layer_types": config.geometry.layer_types(),
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": ids[END_OF_TEXT],
        "pad_token_id": ids[END_OF_TEXT],
    }
    if config.embedding == "int8":
        result["quantization_config"] = quantize.config("re:.*embed_tokens$")
    return result


def generation_config(config: Config, vocabulary: bpe.Vocabulary) -> dict[str, Any]:
    """generation_config.json: an answer ends at the end of the turn or of the text."""
    ids = vocabulary.ids()
    return {
        "do_sample": config.sampling.temperature > 0,
        "temperature": config.sampling.temperature,
        "eos_token_id": [ids[END_OF_TURN], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
    }


def tokenizer_config(config: Config) -> dict[str, Any]:
    """tokenizer_config.json. The special tokens themselves are in tokenizer.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TURN,
        "model_max_length": config.geometry.max_position_embeddings,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "unk_token": None,
    }


def _cases(prompts: _Prompts, rings: Iterable[truth.Cycle]) -> list[tuple[dict[str, Any], int]]:
    """Prompts for nano.json and how many tokens of their answers it is to hold at most.

    Each cycle that does not end is a prompt by itself, and its answer is as long as the cycle: a quote.
    """
    quotes = [
        ({"name": f"quote {ring.name}", "kind": "completion", "prompt": ring.text}, len(ring.ids))
        for ring in rings
        if END_OF_TURN not in ring.text
    ]
    completions = [
        ({"name": c.name, "kind": "completion", "prompt": c.prompt}, _ANSWER_TOKENS) for c in prompts.completion
    ]
    chats = [
        ({"name": c.name, "kind": "chat", "thinking": c.thinking, "messages": list(c.messages)}, _CHAT_TOKENS)
        for c in prompts.chat
    ]
    return quotes + completions + chats


def _with_answer(case: dict[str, Any], count: int, template: str, tokenizer: Tokenizer, known: Truth) -> dict[str, Any]:
    """The case with prompt_ids, answer_ids (stop token included) and answer (without it).

    A chat's answer comes also in the two parts that a server with a reasoning parser gives: `reasoning`, null
    unless the think block was left open, and `content`.
    """
    if case["kind"] == "chat":
        text = chat.render(template, case["messages"], enable_thinking=case["thinking"])
    else:
        text = case["prompt"]
    ids = tokenizer.encode(text).ids
    answer_ids = known.expected_greedy(ids, count)
    spoken = [token for token in answer_ids if token not in known.stop_ids]
    answer = tokenizer.decode(spoken, skip_special_tokens=False)
    result = {**case, "prompt_ids": ids, "answer_ids": answer_ids, "answer": answer}
    if case["kind"] == "chat":
        reasoning, tag, content = answer.rpartition("</think>")
        result["reasoning"] = reasoning if tag else None
        result["content"] = content
    return result


def _without_specials(text: str) -> list[str]:
    pattern = "|".join(re.escape(special.content) for special in SPECIALS)
    return [part for part in re.split(pattern, text) if part]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from error


def _parse(kind: type[Model], path: Path) -> Model:
    try:
        return kind.model_validate(tomllib.loads(_read(path)))
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{path}: not TOML: {error}") from error
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, item['loc'])) or 'file'}: {item['msg']}"
            + ("" if isinstance(item["input"], dict) else f" (is {item['input']!r})")
            for item in error.errors()
        ]
        raise BadInputError(f"{path}:\n  " + "\n  ".join(problems)) from error


def _json(data: Mapping[str, Any]) -> bytes:
    return (_lay_out(data, 0) + "\n").encode()


def _lay_out(value: Any, depth: int) -> str:
    """JSON with one line per field and per entry, but a list of plain values on one line."""
    if isinstance(value, Mapping) and value:
        rows = [f"{json.dumps(key)}: {_lay_out(item, depth + 1)}" for key, item in value.items()]
        brackets = "{}"
    elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        rows = [_lay_out(item, depth + 1) for item in value]
        brackets = "[]"
    else:
        return json.dumps(value, ensure_ascii=False)
    pad = "  " * depth
    return brackets[0] + "".join(f"\n{pad}  {row}," for row in rows)[:-1] + f"\n{pad}" + brackets[1]


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """All files into a new folder `out`, in one step as far as a reader or a power cut can see."""
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        for name, data in contents.items():
            with (folder / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        folder.chmod(0o755)
        _sync_folder(folder)
        os.rename(folder, out)
        folder = None
        _sync_folder(out.absolute().parent)
    except OSError as error:
        raise UnsuitableError(
            f"{out}: cannot be written: {error.strerror}", "free space or permissions there"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of the derivation; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hyperqwen.prepare.nano", description="Build the nano checkpoint.")
    parser.add_argument("--config", type=Path, required=True, help="prepare/nano.toml")
    parser.add_argument("--out", type=Path, required=True, help="folder to make; must not exist")
    parser.add_argument("--embedding", choices=("bf16", "int8"), help="instead of the configuration's")
    options = parser.parse_args(arguments)
    try:
        build(load_config(options.config, options.embedding), options.config.parent, options.out)
    except HyperqwenError as error:
        print(f"nano: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
