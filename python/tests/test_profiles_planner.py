from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.prepare import geometry as geometries
from hyperqwen.profiles import cards, memory
from hyperqwen.profiles.argv import ModelPaths, capture_tokens, engine_flags, engine_settings, model_paths
from hyperqwen.profiles.capabilities import CAPABILITIES
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.planner import Plan, make_plan, models_folder
from hyperqwen.profiles.profile import load, shipped
from tests.test_runtime_model_files import config_of

EVERYTHING = frozenset(CAPABILITIES)
RTX3090 = cards.find("rtx3090")


def plan(name: str, card: cards.Card | None = RTX3090, capabilities: frozenset[str] = EVERYTHING, **flags: str) -> Plan:
    effective = resolve(name, flags={path.replace("__", "."): text for path, text in flags.items()})
    return make_plan(effective, models=Path("/models"), card=card, capabilities=capabilities)


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


# Published pools (upstream-facts 4.2), on an engine with everything -----------------------------------------------


@pytest.mark.parametrize(("name", "tokens", "block"), [("B", 68_605, 448), ("C", 57_669, 480), ("E", 268_169, 2176)])
def test_pinned_pools_are_the_published_ones_to_the_token(name: str, tokens: int, block: int) -> None:
    budget = plan(name).budget

    assert budget is not None
    assert (budget.pool_tokens, budget.pool.block_tokens) == (tokens, block)


@pytest.mark.parametrize(("name", "tokens"), [("A", 217_268), ("D", 202_040)])
def test_pools_of_what_utilization_leaves_are_within_three_percent(name: str, tokens: int) -> None:
    # They depend on the peak that was measured at start, which swings; the law knows it as an estimate.
    budget = plan(name).budget

    assert budget is not None
    assert budget.pool_tokens == pytest.approx(tokens, rel=0.03)


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_profile_starts_on_its_card_with_everything(name: str) -> None:
    found = plan(name, None if name == "demo" else RTX3090)

    assert found.refusals == ()
    found.require_ok()


def test_a_profile_that_needs_what_the_engine_lacks_is_planned_and_refused() -> None:
    found = plan("E", capabilities=frozenset({"kv-group-size"}))

    assert found.lacking == ("kvarn",)
    with pytest.raises(BadInputError, match=r"(?s)cache\.dtype is kvarn_k4v2_g128.*profile D"):
        found.require_ok()


# What does not fit ------------------------------------------------------------------------------------------------


def test_a_context_that_does_not_fit_is_refused_with_the_longest_that_does() -> None:
    found = plan("B", limits__context_tokens="100000")

    (notice,) = found.refusals
    assert (notice.rule, notice.field, notice.value) == ("memory", "limits.context_tokens", 100_000)
    assert plan("B", limits__context_tokens=str(notice.new)).refusals == ()
    assert plan("B", limits__context_tokens=str(notice.new + 1)).refusals != ()


def test_a_larger_card_is_not_left_half_empty_without_a_word() -> None:
    (notice,) = [found for found in plan("B", cards.find("rtx5090")).notices if found.rule == "pool-below-card"]

    assert notice.level == "warn"
    assert "MiB of this one stay unused" in notice.message
    assert notice.new == 0
    larger = plan("B", cards.find("rtx5090"), memory__kv_cache_bytes="0")
    assert larger.budget is not None
    assert f"{larger.budget.pool_tokens:,} tokens" in notice.fix
    # The card that it is made for, and a pool that the user set: nothing to say.
    assert not [found for found in plan("B").notices if found.rule == "pool-below-card"]
    own = plan("B", cards.find("rtx5090"), memory__kv_cache_bytes="5583457484")
    assert not [found for found in own.notices if found.rule == "pool-below-card"]


def test_a_context_that_the_card_has_room_for_is_offered_the_room() -> None:
    (notice,) = plan("B", cards.find("rtx5090"), limits__context_tokens="131072").refusals

    assert "--memory-kv-cache-bytes 0: this card has room for" in notice.fix


def test_a_utilization_that_leaves_no_pool_is_named() -> None:
    (notice,) = plan("A", memory__utilization="0.2").refusals

    assert notice.field == "memory.utilization"
    assert plan("A", memory__utilization=str(notice.new)).refusals == ()


def test_a_drafter_of_no_tokens_is_refused_by_its_rule() -> None:
    (notice,) = plan("B", speculation__tokens="0").refusals

    assert (notice.field, notice.rule) == ("speculation.tokens", "draft-tokens")


def test_a_pin_that_the_card_cannot_give_is_refused_with_one_that_it_can() -> None:
    found = plan("B", cards.find("rtx3090"), memory__kv_cache_bytes=str(9 << 30), limits__context_tokens="8192")

    (notice,) = found.refusals
    assert notice.field == "memory.kv_cache_bytes"
    again = plan("B", memory__kv_cache_bytes=str(notice.new), limits__context_tokens="8192")
    assert again.refusals == ()


def test_a_card_that_is_too_small_is_said_to_be() -> None:
    (notice,) = plan("B", cards.Card.of_vram(12)).refusals

    assert notice.field == "model.name"
    assert "larger card" in notice.fix


# The drafter ------------------------------------------------------------------------------------------------------


def drafter_folder(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_drafter_of_16_bits_is_planned_as_one_and_does_not_fit(tmp_path: Path) -> None:
    config = config_of("qwen3.8-27b-dflash2")
    packed = plan("B", model__drafter=str(drafter_folder(tmp_path / "packed", config)))
    del config["quantization_config"]
    whole = plan("B", model__drafter=str(drafter_folder(tmp_path / "whole", config)))

    assert packed.refusals == ()
    assert {notice.rule for notice in whole.refusals} >= {"bf16-drafter"}
    assert packed.budget is not None and whole.budget is not None
    sizes = [found.figure("weights.drafter").bytes for found in (packed.budget, whole.budget)]
    assert 3 << 30 < sizes[1] < 4 << 30 and sizes[0] < sizes[1] / 2
    assert make_plan(resolve("B"), models=Path("/models"), card=RTX3090).budget is not None


def test_the_drafter_of_the_models_folder_is_the_one_that_is_planned(tmp_path: Path) -> None:
    config = config_of("qwen3.8-27b-dflash2") | {"num_hidden_layers": 3}
    drafter_folder(tmp_path / "qwen3.8-27b-dflash2", config)
    found = make_plan(resolve("B"), models=tmp_path, card=RTX3090, capabilities=EVERYTHING)

    assert found.budget is not None
    assert [group.layers for group in found.budget.pool.groups if group.kind == "window"] == [3]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"architectures": 5}', '{"architectures": ["DFlash2DraftModel"]}'])
def test_a_drafter_that_is_none_is_for_the_look_before_the_start(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    found = plan("B", model__drafter=str(tmp_path))

    assert found.budget is not None
    assert found.budget.pool_tokens == 68_605


def test_a_smaller_model_does_not_keep_the_drafter_of_the_large_one() -> None:
    small = replace(geometries.load("qwen3.8-27b"), name="small", hidden_size=2560, num_hidden_layers=32)

    def with_model(model: geometries.Geometry, method: str = "dflash2") -> Plan:
        effective = resolve("B", flags={"speculation.method": method, "speculation.tokens": "3"})
        return make_plan(effective, models=Path("/m"), card=RTX3090, geometry=model, capabilities=EVERYTHING)

    (notice,) = [notice for notice in with_model(small).refusals if notice.rule == "drafter-shape"]
    assert (notice.field, notice.value, notice.new) == ("speculation.method", "dflash2", "mtp")
    assert "its hidden_size is 5120, and the model's 2560" in notice.message and "has [33, 47, 61]" in notice.message
    assert "--speculation-method mtp" in notice.fix and "--model-drafter" in notice.fix
    assert "drafter-shape" not in {notice.rule for notice in with_model(small, "mtp").notices}
    (other,) = [
        notice
        for notice in with_model(replace(small, mtp_num_hidden_layers=0)).refusals
        if notice.rule == "drafter-shape"
    ]
    assert other.new == "off"


@pytest.mark.parametrize("tensor", ["3", "5", "6", "7"])
def test_cards_that_cannot_share_the_layers(tensor: str) -> None:
    with pytest.raises(BadInputError, match=rf"parallel\.tensor is {tensor} .*; use \d|parallel\.tensor is {tensor}"):
        plan("B", parallel__tensor=tensor).require_ok()


def test_two_cards_hold_half_each() -> None:
    one, two = plan("A").budget, plan("A", parallel__tensor="2").budget

    assert one is not None
    assert two is not None
    assert two.figure("weights.body").bytes == pytest.approx(one.figure("weights.body").bytes / 2, rel=0.01)
    assert two.pool_tokens > 2 * one.pool_tokens


def test_other_members_of_the_family_are_planned_from_their_numbers(tmp_path: Path) -> None:
    whole = geometries.load("qwen3.8-27b")
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        **{
            field: getattr(whole, field)
            for field in whole.__dataclass_fields__
            if field not in ("name", "vision", "num_hidden_layers", "hidden_size", "intermediate_size")
        },
        "num_hidden_layers": 32,
        "hidden_size": 2560,
        "intermediate_size": 9216,
    }
    file = tmp_path / "small" / "config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(config))
    effective = resolve("D")

    small = make_plan(effective, models=Path("/m"), card=cards.Card.of_vram(12), geometry=geometries.load(file))

    assert small.geometry.name == "small"
    assert small.refusals == ()


def test_wsl_gets_less() -> None:
    effective = resolve("A")
    native = make_plan(effective, models=Path("/m"), card=RTX3090, capabilities=EVERYTHING)
    wsl = make_plan(effective, models=Path("/m"), card=RTX3090, capabilities=EVERYTHING, wsl=True)

    assert native.budget is not None
    assert wsl.budget is not None
    assert wsl.profile.memory.utilization < native.profile.memory.utilization
    assert wsl.budget.pool_tokens < native.budget.pool_tokens
    assert wsl.environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}


# argv -------------------------------------------------------------------------------------------------------------


def test_the_argv_says_what_the_profile_says() -> None:
    argv = plan("B", limits__context_tokens="4096", server__port="9000").argv

    assert flag(argv, "--model") == "/models/qwen3.8-27b-fast"
    assert flag(argv, "--max-model-len") == "4096"
    assert flag(argv, "--port") == "9000"
    assert json.loads(flag(argv, "--speculative-config")) == {
        "method": "dflash",
        "model": "/models/qwen3.8-27b-dflash2",
        "num_speculative_tokens": 7,
        "draft_sample_method": "probabilistic",
    }
    assert "--async-scheduling" in argv


def test_no_key_and_no_empty_word_is_ever_in_argv() -> None:
    for name in shipped():
        argv = plan(name, None).argv
        assert "--api-key" not in argv
        assert all(argv)


def test_the_last_words_are_the_users_own() -> None:
    assert plan("B", engine__arguments="--seed 3").argv[-2:] == ("--seed", "3")


def test_settings_of_our_own_code_are_in_the_compile_key() -> None:
    # vLLM hashes its additional configuration: compiled code with other settings is another entry of the cache.
    argv = plan("A").argv

    assert json.loads(flag(argv, "--additional-config")) == {"hyperqwen": {"int8_activations": "mlp"}}
    assert "--additional-config" not in plan("A", capabilities=frozenset()).argv


def test_graphs_never_exceed_what_ends_the_engine() -> None:
    assert capture_tokens(load(shipped()["C"])) == 64
    assert capture_tokens(load(shipped()["C"]).with_values({"limits.concurrent_requests": 8})) == 64
    assert capture_tokens(load(shipped()["E"])) == 16
    assert capture_tokens(load(shipped()["D"])) == 32


def test_a_quantized_cache_leaves_the_drafter_its_own() -> None:
    profile = load(shipped()["E"])
    argv = tuple(engine_flags(profile, model_paths(profile, Path("/m"))))

    assert json.loads(flag(argv, "--speculative-config"))["attention_backend"] == "FLASH_ATTN"
    assert flag(argv, "--block-size") == "128"


def test_folders_can_be_named() -> None:
    argv = plan("B", model__directory="/x/model", model__drafter="/x/drafter").argv

    assert flag(argv, "--model") == "/x/model"
    assert json.loads(flag(argv, "--speculative-config"))["model"] == "/x/drafter"


def test_nothing_is_set_for_an_engine_that_is_stock() -> None:
    assert engine_settings(load(shipped()["demo"])) == {}


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HYPERQWEN_MODELS": "/m"}, "/m"),
        ({"XDG_DATA_HOME": "/d", "HOME": "/h"}, "/d/hyperqwen/models"),
        ({"XDG_DATA_HOME": "d", "HOME": "/h"}, "/h/.local/share/hyperqwen/models"),
    ],
)
def test_where_models_are(environ: dict[str, str], folder: str) -> None:
    assert models_folder(environ) == Path(folder)
    assert models_folder(environ, Path("/given")) == Path("/given")


@pytest.mark.parametrize("text", ["", "models"])
def test_a_models_variable_has_to_be_a_path(text: str) -> None:
    with pytest.raises(BadInputError, match="HYPERQWEN_MODELS"):
        models_folder({"HYPERQWEN_MODELS": text})


def test_a_model_without_a_geometry() -> None:
    with pytest.raises(MissingError, match="did you mean qwen3"):
        plan("B", model__name="qwen3.8-27")


def test_the_report_is_json_and_has_every_byte() -> None:
    found = plan("B")
    report = json.loads(json.dumps(found.report()))

    assert found.budget is not None
    assert report["budget"]["pool"]["tokens"] == found.budget.pool_tokens
    assert report["budget"]["largest_context"] == memory.largest_context(found.budget.load)
    everything = sum(figure["bytes"] for figure in report["budget"]["figures"]) + report["budget"]["margin_bytes"]
    assert everything == report["budget"]["card_bytes"]


def test_model_folders_are_absolute_and_never_a_shells_to_expand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    profile = load(shipped()["B"]).with_values({"speculation.method": "dflash2"})
    own = profile.with_values({"model.directory": "m", "model.drafter": "d"})

    assert model_paths(own, Path("models")) == ModelPaths(tmp_path / "m", tmp_path / "d")
    found = model_paths(profile, Path("models"))
    assert found.model.parent == tmp_path / "models" and found.drafter is not None
    assert found.drafter.parent == tmp_path / "models"
    for values, field in (({"model.directory": "~/m"}, "model.directory"), ({"model.drafter": "~/m"}, "model.drafter")):
        with pytest.raises(BadInputError, match=rf"{field}: ~/m begins with ~\n  fix: write it in full: /home/ann/m"):
            model_paths(profile.with_values(values), Path("models"))
    with pytest.raises(BadInputError, match="--models"):
        model_paths(profile, Path("~/models"))
