from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hyperqwen import errors
from hyperqwen.prepare.tensors import encode
from hyperqwen.runtime.model_files import INDEX, SINGLE, check


def write(folder: Path, shards: int = 2) -> Path:
    """A model of `shards` shards with two tensors each; of 0, one file without an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["Qwen3_5ForCausalLM"]}')
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
    (tmp_path / "file").touch()
    assert said(tmp_path / "file") == f"the model folder {tmp_path / 'file'} is not a folder"
