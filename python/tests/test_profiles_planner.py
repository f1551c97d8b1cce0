from __future__ import annotations

import json
from pathlib import Path

import pytest

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.prepare import geometry as geometries
from hyperqwen.profiles import cards, memory
from hyperqwen.profiles.argv import capture_tokens, engine_flags, engine_settings, model_paths
from hyperqwen.profiles.capabilities import CAPABILITIES
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.planner import Plan, make_plan, models_folder
from hyperqwen.profiles.profile import load, shipped

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
