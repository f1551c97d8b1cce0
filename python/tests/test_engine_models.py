from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.engine.models import is_base_model, served_names, unknown_model_message


@dataclass
class Base:
    name: str
    model_path: str


@dataclass
class Models:
    base_model_paths: list[Base]
    lora_requests: dict[str, Any] = field(default_factory=dict)


STORE = "/nix/store/0b1c2d3e-nano-1.2"
ONE = Models([Base("nano", STORE)])
HUB = Models([Base("qwen3.8-27b", "Qwen/Qwen3.8-27B"), Base("default", "Qwen/Qwen3.8-27B")], {"sql": None, "law": None})


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("nano", ONE),
        (STORE, ONE),
        (STORE + "/", ONE),
        ("0b1c2d3e-nano-1.2", ONE),
        ("qwen3.8-27b", HUB),
        ("default", HUB),
        ("Qwen/Qwen3.8-27B", HUB),
        ("Qwen3.8-27B", HUB),
        ("served", Models([Base("served", "./models/m/")])),
        ("./models/m", Models([Base("served", "./models/m/")])),
        ("m", Models([Base("served", "./models/m/")])),
    ],
)
def test_served_name_root_path_and_basename_are_known(name: str, models: Models) -> None:
    assert is_base_model(name, models)


@pytest.mark.parametrize(
    ("name", "models"),
    [
        ("NANO", ONE),
        ("nano ", ONE),
        ("nano/", ONE),
        ("/nix/store", ONE),
        ("store", ONE),
        ("-nano-1.2", ONE),
        (STORE + "/x", ONE),
        ("x/" + STORE, ONE),
        ("/", ONE),
        ("..", ONE),
        ("qwen3.8-27B", HUB),
        ("Qwen", HUB),
        ("sql", HUB),  # an adapter is no base model: vLLM looks adapters up itself
        (".", Models([Base("here", ".")])),
        ("..", Models([Base("here", "../..")])),
        ("/", Models([Base("root", "/")])),
        ("", Models([Base("root", "/")])),
        ("anything", Models([])),
    ],
)
def test_nothing_else_is_known(name: str, models: Models) -> None:
    assert not is_base_model(name, models)


@given(path=st.text(alphabet="ab/.-", max_size=12), name=st.text(alphabet="ab/.-", max_size=12))
def test_a_known_name_is_the_served_name_the_path_or_its_end(path: str, name: str) -> None:
    if is_base_model(name, Models([Base("served", path)])):
        assert path.rstrip("/") == name.rstrip("/") or path.rstrip("/").endswith("/" + name.rstrip("/"))
        assert name.rstrip("/") not in ("", ".", "..")


def test_served_names_are_base_models_then_adapters_once_each() -> None:
    assert served_names(HUB) == ["qwen3.8-27b", "default", "sql", "law"]
    assert served_names(Models([Base("a", "p"), Base("a", "p")], {"a": None})) == ["a"]


def test_the_message_keeps_vllms_sentence_and_lists_what_works() -> None:
    assert (
        unknown_model_message("gpt-4", HUB)
        == "The model `gpt-4` does not exist. This server serves `qwen3.8-27b`, `default`, `sql`, `law`."
    )
    assert STORE in unknown_model_message("x", Models([Base(STORE, STORE)]))
