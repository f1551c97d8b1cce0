from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyperqwen import errors
from hyperqwen.prepare import geometry as geometries
from hyperqwen.prepare import hollow
from hyperqwen.prepare.tensors import encode
from hyperqwen.runtime.model_files import INDEX, SINGLE, check, other_drafter, other_model


def config_of(name: str, **changes: int) -> dict[str, Any]:
    """config.json of the model or the drafter that prepare/models has under `name`, `changes` at its top."""
    ids: dict[str, int] = defaultdict(int)
    if not name.endswith("-dflash2"):
        return hollow.model_config(geometries.load(name), ids, "fast") | changes
    target = geometries.load(name.removesuffix("-dflash2"))
    return hollow.drafter_config(geometries.load_drafter(name), target) | changes


def write(folder: Path, shards: int = 2, of: str = "nano") -> Path:
    """A folder of the model or drafter `of`, with `shards` shards of two tensors each; 0 is one without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_of(of)))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    where: dict[str, str] = {}
    for number in range(shards or 1):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors" if shards else SINGLE
        tensors = {f"layer.{number}.{part}": np.zeros((3, 4), np.float32) for part in ("a", "b")}
        (folder / name).write_bytes(encode(tensors))
        where |= dict.fromkeys(tensors, name)
    if shards:
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def said(folder: Path, **how: bool) -> str:
    return "\n".join(trouble.cause for trouble in check(folder, **how).troubles)


@pytest.mark.parametrize("shards", [0, 1, 3])
def test_a_sound_model(tmp_path: Path, shards: int) -> None:
    found = check(write(tmp_path / "model", shards))
    assert found.troubles == () and found.shards == (shards or 1)
    assert found.size == sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert "layer.0.a" in found.tensors and len(found.tensors) == 2 * (shards or 1)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    (trouble,) = check(model).troubles
    assert trouble.cause == f"{model} has no {name}" and trouble.code == errors.NOT_FOUND


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": {"vocab": {}}}', '{"model": null}'])
def test_a_tokenizer_that_is_none(model: Path, text: str) -> None:
    (model / "tokenizer.json").write_text(text)
    assert str(model / "tokenizer.json") in said(model)


TEARS: list[Callable[[bytes], bytes]] = [
    lambda data: data[:-1],
    lambda data: data + b"\0",
    lambda data: data[:40],
    lambda data: b"",
    lambda data: data[:8] + b"x" * (len(data) - 8),
    lambda data: (1 << 40).to_bytes(8, "little") + data[8:],
]


@pytest.mark.parametrize("number", range(len(TEARS)))
def test_a_torn_shard_is_named(model: Path, number: int) -> None:
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(TEARS[number](shard.read_bytes()))
    (trouble,) = check(model).troubles
    assert f"{shard}: a torn shard ({shard.stat().st_size:,} bytes)" in trouble.cause
    assert trouble.code == errors.UNVERIFIED


def test_a_shard_that_is_not_there(model: Path) -> None:
    (model / "model-00001-of-00002.safetensors").unlink()
    assert said(model) == f"{model} lacks 1 of 2 shards: model-00001-of-00002.safetensors"


def test_a_tensor_that_the_index_promises_elsewhere(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["layer.9.a"] = "model-00001-of-00002.safetensors"
    (model / INDEX).write_text(json.dumps(index))
    assert "1 tensors of the index are not in it: layer.9.a" in said(model)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "../x.safetensors"}}',
        '{"weight_map": {"a": "x.bin"}}',
        "3",
    ],
)
def test_an_index_that_is_none(model: Path, text: str) -> None:
    (model / INDEX).write_text(text)
    assert f"{model / INDEX} is no index of shards" in said(model)


@pytest.mark.parametrize(
    "name", ["modeling_qwen.py", "pytorch_model.bin", "mtp_draft_vocab_ids.pt", "kernel.so", "x.pkl"]
)
def test_what_could_run_as_code_is_refused(model: Path, name: str) -> None:
    (model / name).touch()
    (trouble,) = check(model, weights=False).troubles
    assert name in trouble.cause and "could run as code" in trouble.cause and trouble.code == errors.USAGE


def test_random_weights_need_no_shards_and_a_drafter_no_tokenizer(model: Path) -> None:
    for shard in model.glob("*.safetensors*"):
        shard.unlink()
    assert f"{model} has neither {INDEX} nor {SINGLE}" in said(model)
    assert said(model, weights=False) == ""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (model / name).unlink()
    assert "tokenizer.json" in said(model, weights=False)
    assert said(model, weights=False, tokenizer=False) == ""


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    assert said(tmp_path / "none") == f"the model folder {tmp_path / 'none'} does not exist"
    (trouble,) = check(tmp_path / "none").troubles
    assert "copy a prepared folder there, or name it with --models FOLDER" in trouble.fix
    assert "prepare the model again" not in trouble.fix
    (tmp_path / "file").touch()
    assert said(tmp_path / "file") == f"the model folder {tmp_path / 'file'} is not a folder"


# The model that was planned for -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nano", "qwen3.8-27b"])
def test_the_planned_model_is_the_one_in_the_folder(tmp_path: Path, name: str) -> None:
    assert other_model(write(tmp_path / "model", of=name), geometries.load(name)) is None


def test_another_model_is_told_by_every_field_that_differs(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", of="qwen3.8-27b")
    wanted = geometries.load("qwen3.8-27b")
    assert wanted.vision is not None
    planned = replace(wanted, hidden_size=2560, num_hidden_layers=32, vision=replace(wanted.vision, depth=3))
    trouble = other_model(folder, planned)
    assert trouble is not None and trouble.code == errors.USAGE and "model.directory" in trouble.fix
    assert trouble.cause == (
        f"{folder / 'config.json'} is not of qwen3.8-27b, which was planned for: hidden_size is 5120, planned 2560; "
        f"num_hidden_layers is 64, planned 32; vision.depth is {wanted.vision.depth}, planned 3"
    )


def test_what_is_not_loaded_may_differ(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", of="qwen3.8-27b")
    planned = replace(geometries.load("qwen3.8-27b"), vision=None, mtp_num_hidden_layers=0)
    assert other_model(folder, planned, vision=False, mtp=False) is None
    for part in ({"vision": False}, {"mtp": False}):
        assert other_model(folder, planned, **part) is not None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"architectures": 5}', '{"architectures": ["LlamaForCausalLM"]}',
     '{"architectures": ["Qwen3_5ForCausalLM"], "text_config": null}',
     '{"architectures": ["Qwen3_5ForCausalLM"], "layer_types": 5}',
     '{"architectures": ["DFlash2DraftModel"], "dflash_config": "x"}'],
)  # fmt: skip
def test_a_config_of_no_such_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for trouble in (other_model(tmp_path, geometries.load("nano")), other_drafter(tmp_path, geometries.load("nano"))):
        assert trouble is not None and trouble.code == errors.USAGE
        assert str(tmp_path / "config.json") in trouble.cause


def test_a_drafter_of_another_model(tmp_path: Path) -> None:
    name, target = "qwen3.8-27b-dflash2", geometries.load("qwen3.8-27b")
    folder = write(tmp_path / "drafter", of=name)
    assert other_drafter(folder, target) is None

    (folder / "config.json").write_text(json.dumps(config_of(name, hidden_size=4096, vocab_size=151_936)))
    trouble = other_drafter(folder, replace(target, num_hidden_layers=48))
    assert trouble is not None and trouble.code == errors.USAGE and "model.drafter" in trouble.fix
    for part in ("hidden_size is 4096, and the model's 5120", "vocab_size is 151936", "target_layer_ids has [61]"):
        assert part in trouble.cause
