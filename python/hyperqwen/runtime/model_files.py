"""Whether a folder holds a model that can be served: files, tokenizer, and shards as long as their headers say.

Only headers are read, so that 15 GB are looked through in milliseconds; nothing here says what the bytes are.
Source of the file format: the safetensors README. Source of the index: transformers' model.safetensors.index.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from hyperqwen import errors
from hyperqwen.errors import BadInputError
from hyperqwen.prepare import geometry as geometries
from hyperqwen.prepare.geometry import Geometry
from hyperqwen.profiles.rules import unlike_target

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
SETTINGS = ("config.json", "generation_config.json")
# What a loader could run instead of read.
_CODE = (".py", ".so")
_PICKLES = (".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth")
_MOST_SHOWN = 5
NOT_PREPARED = (
    "this version cannot prepare it yet (README, On a GPU): copy a prepared folder there, "
    "or name it with --models FOLDER"
)
_KINDS: dict[type, str] = {dict: "an object", list: "a list"}


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong with a folder: what, what to do, and the exit code that goes with it."""

    cause: str
    fix: str
    code: int


@dataclass(frozen=True)
class Files:
    """What a folder of a model holds: shards, their bytes altogether, the tensors' names, and what is wrong with it."""

    folder: Path
    shards: int = 0
    size: int = 0
    tensors: frozenset[str] = frozenset()
    troubles: tuple[Trouble, ...] = ()


def check(folder: Path, *, weights: bool = True, tokenizer: bool = True) -> Files:
    """Look through `folder`.

    Args:
        weights: whether the shards have to be there; they need not for a model of random weights.
        tokenizer: whether a tokenizer has to be; a drafter uses its target's.
    """
    again = "prepare the model again, or name another folder (model.directory, --models)"
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        trouble = Trouble(f"the model folder {folder} {what}", NOT_PREPARED, errors.NOT_FOUND)
        return Files(folder, troubles=(trouble,))
    troubles: list[Trouble] = []
    wanted = [*SETTINGS, *(TOKENIZER if tokenizer else ())] if tokenizer else ["config.json"]
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        troubles.append(Trouble(f"{folder} has no {', no '.join(missing)}", again, errors.NOT_FOUND))
    troubles += [
        Trouble(f"{folder / name}: {said}", again, errors.UNVERIFIED)
        for name in wanted
        if name not in missing and (said := _not_json(folder / name))
    ]
    troubles += _foreign(folder)
    if not weights:
        return Files(folder, troubles=tuple(troubles))
    shards, wrong = _shards(folder, again)
    return Files(
        folder,
        shards=len(shards),
        size=sum((folder / name).stat().st_size for name in shards),
        tensors=frozenset().union(*shards.values()),
        troubles=(*troubles, *wrong),
    )


def other_model(folder: Path, planned: Geometry, *, vision: bool = True, mtp: bool = True) -> Trouble | None:
    """How the model in `folder`, by its config.json, differs from the one that was planned, if it does.

    Args:
        vision, mtp: whether the tower and the MTP head are loaded; else theirs may differ.
    """
    config = folder / "config.json"
    try:
        found = geometries.from_config(_object(config), folder.name, str(config))
    except BadInputError as error:
        return Trouble(error.message, f"name a folder with {planned.name} (model.directory)", errors.USAGE)
    left_out = {"name"} | (set() if vision else {"vision"}) | (set() if mtp else {"mtp_num_hidden_layers"})
    there, wanted = _flat(found, left_out), _flat(planned, left_out)
    differing = [
        f"{field} is {there.get(field)}, planned {wanted.get(field)}"
        for field in sorted(there.keys() | wanted.keys())
        if there.get(field) != wanted.get(field)
    ]
    if not differing:
        return None
    return Trouble(
        f"{config} is not of {planned.name}, which was planned for: {'; '.join(differing)}",
        f"name a folder with {planned.name} (model.directory), or that model (model.name)",
        errors.USAGE,
    )


def other_drafter(folder: Path, target: Geometry) -> Trouble | None:
    """What keeps the drafter in `folder`, by its config.json, from drafting for `target`, if anything does."""
    config = folder / "config.json"
    fix = f"name a folder with a drafter of {target.name} (model.drafter), or set speculation.method to mtp"
    try:
        found = geometries.drafter_from_config(_object(config), folder.name, str(config))
    except BadInputError as error:
        return Trouble(error.message, fix, errors.USAGE)
    wrong = unlike_target(found, target)
    return Trouble(f"{config} is no drafter of {target.name}: {'; '.join(wrong)}", fix, errors.USAGE) if wrong else None


def _object(config: Path) -> dict[str, Any]:
    """The object that a config.json holds. Raises BadInputError where it holds none, or one that no model has."""
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInputError(f"{config} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise BadInputError(f"{config} holds no object")
    text = content.get("text_config", content)
    for where, field, kind in (
        (content, "text_config", dict),
        (content, "dflash_config", dict),
        (content, "architectures", list),
        (text, "layer_types", list),
    ):
        if isinstance(where, dict) and not isinstance(where.get(field, kind()), kind):
            raise BadInputError(f"{config}: {field} is {where[field]!r}; it must be {_KINDS[kind]}")
    return content


def _flat(geometry: Geometry, left_out: set[str]) -> dict[str, object]:
    """Its fields by name, those of the tower as "vision.depth"."""
    fields = {name: value for name, value in asdict(geometry).items() if name not in left_out}
    vision = fields.pop("vision", None) or {}
    return fields | {f"vision.{name}": value for name, value in vision.items()}


def _not_json(path: Path) -> str | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except ValueError as error:
        return f"is not JSON: {error}"
    if path.name == "tokenizer.json":
        model = data.get("model") if isinstance(data, dict) else None
        if not isinstance(model, dict) or not model.get("vocab"):
            # The engine would go on with an empty vocabulary, and blame the reasoning parser.
            return "is a tokenizer without a vocabulary"
    return None


def _foreign(folder: Path) -> list[Trouble]:
    """Files that a loader might run: code, and pickles, which are code."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (*_CODE, *_PICKLES))
    if not names:
        return []
    cause = f"{folder} has files that could run as code: {_some(names)}"
    return [Trouble(cause, "take them out: nothing here is loaded but safetensors and JSON", errors.USAGE)]


def _shards(folder: Path, again: str) -> tuple[dict[str, set[str]], list[Trouble]]:
    """The shards that are there, each with its tensors, and what is wrong with the whole of them."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            return {}, [Trouble(f"{folder} has neither {INDEX} nor {SINGLE}", again, errors.NOT_FOUND)]
        promised: dict[str, set[str]] = {SINGLE: set()}
    else:
        try:
            promised = _index(index)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return {}, [Trouble(f"{index} is no index of shards: {error}", again, errors.UNVERIFIED)]
    there: dict[str, set[str]] = {}
    troubles = []
    absent = sorted(name for name in promised if not (folder / name).is_file())
    if absent:
        cause = f"{folder} lacks {len(absent)} of {len(promised)} shards: {_some(absent)}"
        troubles.append(Trouble(cause, again, errors.NOT_FOUND))
    for name in sorted(set(promised) - set(absent)):
        path = folder / name
        try:
            # Opening checks the header, that the tensors lie without gaps, and that the file is exactly that long.
            with safe_open(path, framework="numpy") as file:
                there[name] = set(file.keys())
        except (SafetensorError, OSError) as error:
            there[name] = set()
            cause = f"{path}: a torn shard ({path.stat().st_size:,} bytes): {error}"
            troubles.append(Trouble(cause, again, errors.UNVERIFIED))
            continue
        lacking = sorted(promised[name] - there[name])
        if lacking:
            cause = f"{path}: {len(lacking)} tensors of the index are not in it: {_some(lacking)}"
            troubles.append(Trouble(cause, again, errors.UNVERIFIED))
    return there, troubles


def _index(path: Path) -> dict[str, set[str]]:
    """Each shard that the index names, with the tensors that it promises there."""
    shards: dict[str, set[str]] = {}
    for tensor, name in json.loads(path.read_text(encoding="utf-8"))["weight_map"].items():
        shards.setdefault(str(name), set()).add(tensor)
    if not shards or any("/" in name or not name.endswith(".safetensors") for name in shards):
        raise ValueError("its weight_map does not name safetensors files of this folder")
    return shards


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")
