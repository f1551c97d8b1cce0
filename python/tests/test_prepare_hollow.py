"""Folders without weights: what their files say is the model's shape, and their tokenizer reads and speaks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from hyperqwen.errors import BadInputError
from hyperqwen.prepare import bpe, chat, geometry, hollow, nano

SPECIALS = nano.SPECIALS
MODEL = geometry.load("qwen3.8-27b")
DRAFTER = geometry.load_drafter("qwen3.8-27b-dflash2")
TEMPLATE = Path(__file__).resolve().parents[2] / "prepare/nano/chat_template.jinja"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small tokenizer with Qwen's special tokens, and what lies beside it."""
    folder = tmp_path / "small"
    folder.mkdir()
    units = (*bpe.byte_alphabet(), "th", "the")
    merges = (("t", "h"), ("th", "e"))
    (folder / "tokenizer.json").write_text(bpe.tokenizer(bpe.Vocabulary(units, merges, SPECIALS)).to_str())
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())
    return folder


def load(path: Path) -> Any:
    return json.loads(path.read_bytes())


def test_the_27b_pair_has_the_shape_of_the_geometry(tmp_path: Path, source: Path) -> None:
    assert hollow.main(["--tokenizer", str(source), "--out", str(tmp_path / "models")]) == 0
    model, drafter = tmp_path / "models/qwen3.8-27b-fast", tmp_path / "models/qwen3.8-27b-dflash2"
    assert replace(geometry.load(model), name=MODEL.name) == MODEL
    assert replace(geometry.load_drafter(drafter), name=DRAFTER.name) == DRAFTER
    config = load(model / "config.json")
    text = config["text_config"]
    assert [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"] == list(range(3, 64, 4))
    assert (text["eos_token_id"], config["image_token_id"], config["vision_end_token_id"]) == (248044, 248056, 248054)
    assert text["rope_parameters"]["mrope_section"] == [11, 11, 10]
    assert load(model / "generation_config.json")["eos_token_id"] == [248046, 248044]
    assert sorted(path.name for path in model.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_the_tokenizer_reads_and_every_id_is_text(tmp_path: Path, source: Path) -> None:
    hollow.write_model(tmp_path / "m", MODEL, source)
    small = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "m/tokenizer.json"))
    assert tokenizer.get_vocab_size() == 248_044 + len(SPECIALS)
    assert tokenizer.encode("the theory").ids == small.encode("the theory").ids
    prompt = chat.render(TEMPLATE.read_text(), [{"role": "user", "content": "the"}])
    ids = tokenizer.encode(prompt).ids
    assert (ids[0], 248046 in ids, 248068 in ids) == (248045, True, True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt
    for token in (257, 258, 100_000, 248_043):
        assert tokenizer.decode([token]).strip()
    assert tokenizer.id_to_token(248_069) == "</think>"


@pytest.mark.parametrize(("variant", "bits"), [("base", 8), ("fast", 4)])
def test_bits_of_the_groups(variant: hollow.Variant, bits: int) -> None:
    groups = hollow.quantization(variant)["config_groups"].values()
    found = {group["targets"][0]: (group["weights"]["num_bits"], group["weights"]["group_size"]) for group in groups}
    assert found == {
        "Linear": (4, 128),
        "re:.*lm_head$": (bits, 128),
        "re:.*embed_tokens$": (8, 128),
        "re:^mtp\\..*": (bits, 128),
    }


def test_a_text_model_has_no_vision_and_no_mrope(tmp_path: Path, source: Path) -> None:
    """And in a small vocabulary the special tokens follow the others."""
    small = replace(geometry.load("nano"), vocab_size=320)
    hollow.write_model(tmp_path / "m", small, source)
    config = load(tmp_path / "m/config.json")
    assert config["architectures"] == ["Qwen3_5ForCausalLM"] and "vision_config" not in config
    assert sorted(config["rope_parameters"]) == ["partial_rotary_factor", "rope_theta", "rope_type"]
    assert config["eos_token_id"] == 258
    assert replace(geometry.load(tmp_path / "m"), name="nano") == small


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    other = replace(MODEL, hidden_size=4096, num_hidden_layers=60)
    with pytest.raises(
        BadInputError, match=r"hidden_size is 5120, but the target's is 4096; target_layer_ids has \[61\]"
    ):
        hollow.write_drafter(tmp_path / "d", DRAFTER, other)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "qwen3.8-27b-fast").mkdir()
    assert hollow.main(["--tokenizer", str(source), "--out", str(tmp_path)]) == 2
    assert "qwen3.8-27b-fast exists already" in capsys.readouterr().err


def test_a_vocabulary_too_small(tmp_path: Path, source: Path) -> None:
    with pytest.raises(BadInputError, match="258 tokens and 26 special ones, the model a vocabulary of 256"):
        hollow.write_model(tmp_path / "m", replace(MODEL, vocab_size=256), source)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"vocab": {"a": 1}}, "added_tokens": []}'])
def test_no_tokenizer(tmp_path: Path, source: Path, text: str) -> None:
    (source / "tokenizer.json").write_text(text)
    with pytest.raises(BadInputError, match=r"tokenizer\.json is no BPE tokenizer"):
        hollow.write_model(tmp_path / "m", MODEL, source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(BadInputError, match=r"tokenizer\.json cannot be read"):
        hollow.write_model(tmp_path / "m", MODEL, source)
    assert not (tmp_path / "m").exists()


def test_a_tokenizer_without_qwens_tokens(tmp_path: Path, source: Path) -> None:
    data = load(source / "tokenizer.json")
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<|video_pad|>"]
    (source / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(BadInputError, match=r"lacks <\|video_pad\|>"):
        hollow.write_model(tmp_path / "m", MODEL, source)
