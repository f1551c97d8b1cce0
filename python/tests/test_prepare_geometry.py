"""Geometry of the family: read from our files and from config.json, refused where it is not, cut over cards."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.prepare import geometry
from hyperqwen.prepare.geometry import Geometry

REPOSITORY = Path(__file__).resolve().parents[2]
QWEN = geometry.load("qwen3.8-27b")
DRAFTER = geometry.load_drafter("qwen3.8-27b-dflash2")

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
    },
    "vision_config": {
        "depth": 27,
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "num_position_embeddings": 2304,
        "out_hidden_size": 5120,
        "deepstack_visual_indexes": [],
    },
}


def test_the_27b_is_what_upstream_facts_say() -> None:
    assert (QWEN.attention_layers, QWEN.recurrent_layers) == (16, 48)
    assert [i for i in range(64) if QWEN.is_attention(i)] == list(range(3, 64, 4))
    assert (QWEN.key_dim, QWEN.value_dim, QWEN.conv_dim) == (2048, 6144, 10240)
    assert QWEN.queries_per_key == 6


def test_a_config_json_gives_the_same_as_our_file(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3.8-27b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    assert geometry.load(folder) == QWEN
    assert geometry.load(folder / "config.json") == QWEN


def test_a_text_model_has_its_fields_at_the_top_and_no_tower(tmp_path: Path) -> None:
    flat = {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True, **CONFIG["text_config"]}
    found = geometry.from_config(flat, "flat", "config.json")
    assert found.vision is None
    assert found.tie_word_embeddings
    assert found.hidden_size == 5120


def test_the_interval_follows_from_the_kinds_of_layers() -> None:
    config = deepcopy(CONFIG)
    del config["text_config"]["full_attention_interval"]
    config["text_config"]["layer_types"] = ["linear_attention", "full_attention"] * 32
    assert geometry.from_config(config, "x", "x").full_attention_interval == 2


def test_nano_has_the_geometry_that_it_is_constructed_with() -> None:
    constructed = tomllib.loads((REPOSITORY / "prepare/nano.toml").read_text())["geometry"]
    planned = geometry.load("nano")
    assert {key: getattr(planned, key) for key in constructed} == constructed


def test_names_are_the_targets_only() -> None:
    assert geometry.names() == ("nano", "qwen3.8-27b")


def test_a_drafter_is_read_from_its_config_json(tmp_path: Path) -> None:
    config = {
        "architectures": ["DFlash2DraftModel"],
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 248320,
        "sliding_window": 4096,
        "block_size": 8,
        "dflash_config": {
            "swa_window_size": 2048,
            "target_layer_ids": [5, 19, 33, 47, 61],
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": 256,
            "selector_top_k": 16,
        },
    }
    folder = tmp_path / "qwen3.8-27b-dflash2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert geometry.load_drafter(folder) == DRAFTER
    config["architectures"] = ["LlamaForCausalLM"]
    with pytest.raises(BadInputError, match=r"architectures is 'LlamaForCausalLM'; it must be DFlash2DraftModel"):
        geometry.drafter_from_config(config, "x", "x")


def _text(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["text_config"].__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c.update(architectures=["LlamaForCausalLM"]),
            "architectures is 'LlamaForCausalLM'; it must be Qwen3",
        ),
        (lambda c: c.pop("architectures"), "architectures is missing"),
        (_text("hidden_size", "5120"), "text_config.hidden_size is '5120'; it must be a whole number from 1"),
        (_text("hidden_size", True), "text_config.hidden_size is True"),
        (_text("head_dim", 0), "text_config.head_dim is 0"),
        (lambda c: c["text_config"].pop("linear_conv_kernel_dim"), "text_config.linear_conv_kernel_dim is missing"),
        (_text("attention_bias", True), "text_config.attention_bias is True; it must be False"),
        (_text("attn_output_gate", False), "text_config.attn_output_gate is False; it must be True"),
        (_text("hidden_act", "gelu"), "text_config.hidden_act is 'gelu'; it must be 'silu'"),
        (_text("num_experts", 256), "text_config.num_experts is 256; it must be absent"),
        (
            _text("num_key_value_heads", 5),
            "num_attention_heads is 24; it must be a multiple of num_key_value_heads = 5",
        ),
        (_text("linear_num_key_heads", 7), "linear_num_value_heads is 48; it must be a multiple"),
        (_text("layer_types", ["full_attention"] * 64), "text_config.layer_types is "),
        (_text("num_hidden_layers", 60), "text_config.layer_types is "),
        (_text("full_attention_interval", 1), "full_attention_interval is 1"),
        (lambda c: c["vision_config"].update(depth=None), "vision_config.depth is missing"),
        (lambda c: c.update(vision_config=[]), "vision_config is []; it must be a table"),
    ],
)
def test_what_is_not_of_the_family_is_refused_with_its_field(change: Any, message: str) -> None:
    config = deepcopy(CONFIG)
    change(config)
    with pytest.raises(BadInputError) as caught:
        geometry.from_config(config, "x", "/models/x/config.json")
    assert message in str(caught.value)
    assert "/models/x/config.json" in str(caught.value)


def test_all_problems_are_said_at_once() -> None:
    config = deepcopy(CONFIG)
    config["text_config"].update(hidden_size=-1, head_dim=None)
    with pytest.raises(BadInputError, match=r"2 problems in x:\n.*hidden_size.*\n.*head_dim"):
        geometry.from_config(config, "x", "x")


def test_a_table_takes_no_field_that_it_does_not_know() -> None:
    table = {**tomllib.loads((REPOSITORY / "prepare/models/nano.toml").read_text())["geometry"], "hidden_sise": 3}
    with pytest.raises(BadInputError, match=r"geometry.hidden_sise is not a field; did you mean hidden_size\?"):
        geometry.from_table(table, "x", "x.toml")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("qwen3.8-72b", MissingError, "did you mean qwen3.8-27b"),
        ("nonexistent/config.json", MissingError, "does not exist"),
        ("qwen3.8-27b-dflash2", BadInputError, r"has no table \[geometry\]"),
    ],
)
def test_a_wrong_name_is_said(name: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        geometry.load(name)


def test_a_broken_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadInputError, match="is not JSON"):
        geometry.load(tmp_path)
    (tmp_path / "x.toml").write_text("[geometry")
    with pytest.raises(BadInputError, match="is not TOML"):
        geometry.load(tmp_path / "x.toml")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(BadInputError, match="holds no object"):
        geometry.load(tmp_path)


# Several cards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cards", [1, 2, 4, 8])
def test_the_27b_and_its_drafter_divide(cards: int) -> None:
    geometry.check_tensor_parallel(QWEN, cards, drafter=DRAFTER, vision=True)


@pytest.mark.parametrize(("cards", "nearest"), [(0, 1), (3, 2), (5, 4), (6, 4), (7, 8), (9, 8), (64, 8)])
def test_what_does_not_divide_is_refused_with_the_nearest_that_does(cards: int, nearest: int) -> None:
    with pytest.raises(BadInputError) as caught:
        geometry.check_tensor_parallel(QWEN, cards, drafter=DRAFTER)
    assert f"parallel.tensor is {cards}" in str(caught.value)
    assert f"use {nearest} (what works: 1, 2, 4, 8)" in str(caught.value)


def test_three_cards_are_refused_for_the_four_key_value_heads() -> None:
    with pytest.raises(BadInputError, match=r"num_key_value_heads of qwen3.8-27b is 4, which 3 cards can neither"):
        geometry.check_tensor_parallel(QWEN, 3)


def _with(**changes: Any) -> Geometry:
    return replace(QWEN, **changes)


@pytest.mark.parametrize(
    ("changed", "cards", "field"),
    [
        (_with(num_attention_heads=20), 8, "num_attention_heads"),
        (_with(linear_num_key_heads=6, linear_num_value_heads=48), 4, "linear_num_key_heads"),
        (_with(linear_num_key_heads=2, linear_num_value_heads=6), 4, "linear_num_key_heads"),
        (_with(intermediate_size=17408 + 4), 8, "intermediate_size"),
        (_with(intermediate_size=128 * 6), 4, "whole groups"),
    ],
)
def test_every_field_that_is_cut_is_looked_at(changed: Geometry, cards: int, field: str) -> None:
    with pytest.raises(BadInputError, match=field):
        geometry.check_tensor_parallel(changed, cards)


def test_a_drafter_can_be_what_does_not_divide() -> None:
    with pytest.raises(BadInputError, match="the drafter's num_key_value_heads"):
        geometry.check_tensor_parallel(QWEN, 4, drafter=replace(DRAFTER, num_key_value_heads=6, num_attention_heads=36))


def test_without_quantization_a_card_needs_no_whole_groups() -> None:
    nano = geometry.load("nano")
    geometry.check_tensor_parallel(_with(intermediate_size=128 * 6), 4, quantized=False)
    with pytest.raises(BadInputError, match="linear_num_key_heads of nano is 1"):
        geometry.check_tensor_parallel(nano, 2, quantized=False)


def test_key_value_heads_are_cut_or_repeated() -> None:
    assert [geometry.key_value_heads(4, cards) for cards in (1, 2, 4, 8)] == [4, 2, 1, 1]


@pytest.mark.parametrize("name", ["config.json", "m.toml"])
@pytest.mark.parametrize("value", ["1" * 5000, "[" * 50_000], ids=["digits", "nested"])
def test_what_python_cannot_hold_is_the_files_mistake(tmp_path: Path, name: str, value: str) -> None:
    file = tmp_path / name
    file.write_text(f'{{"a": {value}' if name.endswith(".json") else f"a = {value}")
    with pytest.raises(BadInputError, match=rf"{name} is n"):
        geometry.load(file)


@pytest.mark.parametrize(
    ("field", "most"), [("num_hidden_layers", 1024), ("hidden_size", 131072), ("vocab_size", 4194304)]
)
def test_counts_have_an_end(field: str, most: int) -> None:
    with pytest.raises(BadInputError, match=rf"{field} is {most + 1}; it must be a whole number from 1 to {most}"):
        geometry.from_config(
            {"architectures": ["Qwen3_5ForCausalLM"], **CONFIG["text_config"], field: most + 1}, "m", "config.json"
        )


@pytest.mark.parametrize(
    ("change", "field"),
    [({"architectures": 7}, "architectures"), ({"text_config": 7}, "text_config"), ({"layer_types": 7}, "layer_types")],
)
def test_a_field_of_another_kind_is_said(change: dict[str, int], field: str) -> None:
    with pytest.raises(BadInputError, match=rf"{field} is 7; it must be"):
        geometry.from_config(
            {"architectures": ["Qwen3_5ForCausalLM"], **CONFIG["text_config"], **change}, "m", "config.json"
        )
