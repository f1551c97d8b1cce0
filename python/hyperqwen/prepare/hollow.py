"""Model folders without weights: configuration and tokenizer at a model's true size, for load_format "dummy".

    python -m hyperqwen.prepare.hollow --tokenizer NANO --out MODELS [--model qwen3.8-27b] [--variant fast]

writes MODELS/qwen3.8-27b-fast and MODELS/qwen3.8-27b-dflash2. vLLM started on them with random weights allocates,
compiles and computes what it does for the real checkpoints, so that memory and speed can be measured on a box that
has none. What it says is noise.

The tokenizer is a small one stretched to the model's vocabulary: the real special tokens at their real ids, and every
other id decodes to some text.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from hyperqwen.errors import BadInputError, HyperqwenError, UnsuitableError
from hyperqwen.prepare import geometry, quantize
from hyperqwen.prepare.geometry import Drafter, Geometry

Variant = Literal["base", "fast"]

FIRST_SPECIAL = 248_044
"""Id of <|endoftext|> in Qwen3.5's vocabulary of 248,320 rows; the other special tokens follow."""

SELECTOR_TOP_K = 16
"""Candidates a slot of the published drafter; no shape depends on it."""

_COPIED = ("chat_template.jinja", "tokenizer_config.json")
_TEXT_OF_FILLER = "Ġw{:x}"
_NAMES = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def write_model(out: Path, model: Geometry, tokenizer: Path, variant: Variant = "fast") -> None:
    """The target's folder.

    Args:
        out: the folder to make.
        tokenizer: a model folder whose tokenizer and chat template are used, such as nano's.
        variant: bits of lm_head and MTP head; 8 for base, 4 for fast.

    Raises:
        BadInputError: `out` exists, or the tokenizer is missing, not one, or larger than the model's vocabulary.
        UnsuitableError: writing fails.
    """
    ids, stretched = _stretched(tokenizer, model.vocab_size)
    _write(
        out,
        {
            **{name: _read(tokenizer / name) for name in _COPIED},
            "config.json": _json(model_config(model, ids, variant)),
            "generation_config.json": _json(generation_config(ids)),
            "tokenizer.json": stretched,
        },
    )


def write_drafter(out: Path, drafter: Drafter, target: Geometry) -> None:
    """The drafter's folder, which is its config.json: it reads and speaks through the target.

    Raises:
        BadInputError: `out` exists, or the drafter is not one for `target`.
        UnsuitableError: writing fails.
    """
    _write(out, {"config.json": _json(drafter_config(drafter, target))})


def model_config(model: Geometry, ids: Mapping[str, int], variant: Variant) -> dict[str, Any]:
    """config.json of the target in W4A16, as the prepared checkpoints have it.

    Every field is given: the configuration class's defaults are another size's.

    Args:
        ids: ids of the special tokens.
    """
    shape = asdict(model)
    vision = shape.pop("vision")
    del shape["name"]
    text = {
        **shape,
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "layer_types": [
            "full_attention" if model.is_attention(index) else "linear_attention"
            for index in range(model.num_hidden_layers)
        ],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": None,
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000_000,
            "partial_rotary_factor": 0.25,
            **({} if vision is None else {"mrope_section": _mrope_section(model), "mrope_interleaved": True}),
        },
        "use_cache": True,
    }
    common = {"quantization_config": quantization(variant)}
    if vision is None:
        return {"architectures": ["Qwen3_5ForCausalLM"], **common, **text}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        **common,
        **{field: ids[token] for field, token in _NAMES.items()},
        "tie_word_embeddings": model.tie_word_embeddings,
        "text_config": text,
        "vision_config": {
            **vision,
            "model_type": "qwen3_5",
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "deepstack_visual_indexes": [],
        },
    }


def quantization(variant: Variant) -> dict[str, Any]:
    """quantization_config of the target: int4 body, embedding of int8, heads of 8 or 4 bits."""
    bits = {"base": 8, "fast": 4}[variant]
    return _quantization(
        [("Linear", 4), ("re:.*lm_head$", bits), ("re:.*embed_tokens$", 8), ("re:^mtp\\..*", bits)],
        # Two projections of 48 rows each, and the vision tower, stay bfloat16.
        ["re:.*\\.in_proj_[ab]$", "re:.*visual\\..*"],
    )


def generation_config(ids: Mapping[str, int]) -> dict[str, Any]:
    """generation_config.json with the model's own sampling."""
    return {
        "do_sample": True,
        "temperature": 1.0,
        "top_p": 0.95,
        "top_k": 20,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
    }


def drafter_config(drafter: Drafter, target: Geometry) -> dict[str, Any]:
    """config.json of the drafter in W4A16, as the published one has it.

    Raises:
        BadInputError: its shape does not fit the target's.
    """
    wrong = [
        f"{field} is {getattr(drafter, field)}, but the target's is {getattr(target, field)}"
        for field in ("vocab_size", "hidden_size")
        if getattr(drafter, field) != getattr(target, field)
    ]
    beyond = [layer for layer in drafter.target_layer_ids if layer >= target.num_hidden_layers]
    if beyond:
        wrong.append(f"target_layer_ids has {beyond}, but the target has {target.num_hidden_layers} layers")
    if wrong:
        raise BadInputError(f"drafter {drafter.name} of {target.name}: {'; '.join(wrong)}", "name the model's drafter")
    shape = asdict(drafter)
    del shape["name"]
    inner = {
        key: shape.pop(key) for key in ("target_layer_ids", "conv_kernel_size", "conv_group_size", "selector_rank")
    }
    return {
        "architectures": [geometry.DRAFTER_ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        **shape,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * drafter.num_hidden_layers,
        "use_sliding_window": True,
        "max_position_embeddings": target.max_position_embeddings,
        "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000},
        "tie_word_embeddings": False,
        "use_cache": True,
        "dflash_config": {
            **inner,
            "selector_top_k": SELECTOR_TOP_K,
            # Any row of the embedding that no text uses.
            "mask_token_id": drafter.vocab_size - 1,
        },
        "quantization_config": _quantization(
            [("Linear", 4)],
            ["lm_head", "re:.*kernel_projection$", "re:.*candidate_selector\\..*", "re:.*hidden_projection$"],
        ),
    }


def _mrope_section(model: Geometry) -> list[int]:
    """How the rotated pairs, a quarter of the head's half, divide into time, height and width: 11, 11, 10 of 32."""
    pairs = model.head_dim // 8
    third = pairs // 3
    rest = pairs - 3 * third
    return [third + (rest > 0), third + (rest > 1), third]


def _quantization(groups: Sequence[tuple[str, int]], ignore: Sequence[str]) -> dict[str, Any]:
    """A compressed-tensors configuration of symmetric groups of 128: each target with its bits."""
    config = quantize.config(groups[0][0])
    (plain,) = config["config_groups"].values()
    config["config_groups"] = {
        f"group_{index}": {**plain, "targets": [target], "weights": {**plain["weights"], "num_bits": bits}}
        for index, (target, bits) in enumerate(groups)
    }
    return {**config, "ignore": list(ignore)}


def _stretched(folder: Path, vocabulary: int) -> tuple[dict[str, int], bytes]:
    """The ids of the special tokens, and tokenizer.json with its special tokens at Qwen's ids.

    In a vocabulary too small for those, the special tokens follow the others, as in the file.
    """
    path = folder / "tokenizer.json"
    try:
        data = json.loads(_read(path))
        words, specials = data["model"]["vocab"], data["added_tokens"]
        count = len(words)
        if sorted(words.values()) != list(range(count)):
            raise ValueError("the ids of model.vocab have gaps")
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{path} is no BPE tokenizer: {error!r}", "name the folder of a model such as nano"
        ) from None
    first = FIRST_SPECIAL if FIRST_SPECIAL + len(specials) <= vocabulary else count
    if first < count or first + len(specials) > vocabulary:
        raise BadInputError(
            f"{path} has {count} tokens and {len(specials)} special ones, the model a vocabulary of {vocabulary}",
            "name the folder of a smaller tokenizer",
        )
    for index in range(count, first):
        words[_TEXT_OF_FILLER.format(index)] = index
    if len(words) != first:
        raise BadInputError(f"{path} has tokens such as {_TEXT_OF_FILLER.format(count)!r}", "name another tokenizer")
    for index, special in enumerate(specials):
        special["id"] = first + index
    ids = {special["content"]: special["id"] for special in specials}
    missing = {"<|endoftext|>", "<|im_end|>", *_NAMES.values()} - set(ids)
    if missing:
        raise BadInputError(f"{path} lacks {', '.join(sorted(missing))}", "name the folder of a Qwen-like tokenizer")
    return ids, json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInputError(
            f"{path} cannot be read: {error.strerror}", "name the folder of a model such as nano"
        ) from None


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()


def _write(out: Path, contents: Mapping[str, bytes]) -> None:
    """All files into a new folder, which takes its name when it is whole."""
    if os.path.lexists(out):
        raise BadInputError(f"{out} exists already", "remove it, or name another folder")
    folder: Path | None = None
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
        for name, data in contents.items():
            with (folder / name).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        folder.chmod(0o755)
        os.rename(folder, out)
        folder = None
    except OSError as error:
        raise UnsuitableError(
            f"{out}: cannot be written: {error.strerror}", "free space or permissions there"
        ) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit code, and prints the folders."""
    parser = argparse.ArgumentParser(prog="python -m hyperqwen.prepare.hollow", description="Models without weights.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model folder whose tokenizer is stretched")
    parser.add_argument("--out", type=Path, required=True, help="folder for the two model folders")
    parser.add_argument("--model", default="qwen3.8-27b", help="a file of prepare/models, without .toml")
    parser.add_argument("--variant", choices=("base", "fast"), default="fast", help="bits of the heads: 8, or 4")
    options = parser.parse_args(arguments)
    try:
        model, drafter = geometry.load(options.model), geometry.load_drafter(f"{options.model}-dflash2")
        suffix = {"base": "", "fast": "-fast"}[options.variant]
        folders = options.out / f"{options.model}{suffix}", options.out / f"{options.model}-dflash2"
        write_model(folders[0], model, options.tokenizer, options.variant)
        write_drafter(folders[1], drafter, model)
    except HyperqwenError as error:
        print(f"hollow: {error}", file=sys.stderr)
        return error.exit_code
    print(*folders, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
