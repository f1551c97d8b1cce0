from __future__ import annotations

import re
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.delivery.compose import compose_file
from hyperqwen.delivery.container import container
from hyperqwen.profiles.layers import Effective, resolve
from hyperqwen.profiles.profile import shipped


def compose(name: str = "B", **values: str) -> Any:
    changed = {knob.replace("__", "."): value for knob, value in values.items()}
    return yaml.safe_load(compose_file(container(resolve(name, flags=changed))))


def interpolated(text: str) -> str:
    """What Docker Compose makes of a value without variables."""
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text.replace("$$", "")), text
    return text.replace("$$", "$")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_container_has_no_privileges_and_only_this_machine_reaches_it(name: str) -> None:
    data = compose(name)
    server = data["services"]["server"]
    assert server["read_only"] is True
    assert server["init"] is True
    assert server["cap_drop"] == ["ALL"]
    assert server["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in server and "cap_add" not in server
    assert server["ports"] == ["127.0.0.1:18020:18020"]
    assert server["image"] == f"localhost/hyperqwen:{data['name'].removeprefix('hyperqwen-')}"


def test_key_is_a_file_and_never_a_variable() -> None:
    data = compose("B", server__api_key_file="/etc/key")
    server = data["services"]["server"]
    assert data["secrets"] == {"key": {"file": "/etc/key"}}
    assert server["secrets"] == [{"source": "key", "target": server["environment"]["HYPERQWEN_SERVER_API_KEY_FILE"]}]
    assert "HYPERQWEN_API_KEY" not in server["environment"]
    assert compose("B")["secrets"]["key"]["file"].startswith("./")


@pytest.mark.parametrize("name", sorted(shipped()))
def test_only_profiles_for_cards_have_devices_and_models(name: str) -> None:
    data = compose(name)
    server = data["services"]["server"]
    if name == "demo":
        assert "devices" not in server
        assert list(data["volumes"]) == ["hyperqwen-cache"]
    else:
        assert server["devices"] == ["nvidia.com/gpu=all"]
        assert "${HYPERQWEN_MODELS:-hyperqwen-models}:/models:ro" in server["volumes"]
        assert set(data["volumes"]) == {"hyperqwen-cache", "hyperqwen-models"}
    assert "hyperqwen-cache:/cache" in server["volumes"]


def test_times_are_the_profiles() -> None:
    server = compose("B", server__drain_seconds="100", server__start_seconds="700")["services"]["server"]
    assert server["stop_grace_period"] == "130s"
    assert server["healthcheck"]["start_period"] == "700s"
    assert server["healthcheck"]["test"][:3] == ["CMD", "/bin/hyperqwen", "health"]
    assert server["environment"]["HYPERQWEN_SERVER_DRAIN_SECONDS"] == "100"


def test_address_and_port_are_published() -> None:
    assert compose("B", server__host="::1", server__port="9")["services"]["server"]["ports"] == ["[::1]:9:18020"]
    text = compose_file(container(resolve("B", flags={"server.host": "0.0.0.0"})))
    assert "Open to other machines" in text
    assert "This machine alone" not in text


def test_folders_of_models_are_mounted_read_only_in_place_of_the_volume() -> None:
    data = compose("B", model__directory="/m/$one two", model__drafter="/d")
    mounts = [mount for mount in data["services"]["server"]["volumes"] if isinstance(mount, dict)]
    assert [(interpolated(mount["source"]), mount["target"], mount["read_only"]) for mount in mounts] == [
        ("/m/$one two", "/models/qwen3.8-27b-fast", True),
        ("/d", "/models/qwen3.8-27b-dflash2", True),
    ]
    assert list(data["volumes"]) == ["hyperqwen-cache"]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_value_arrives_as_it_was(value: str) -> None:
    effective = Effective(resolve("B").profile.with_values({"engine.arguments": [value]}), {})
    server = yaml.safe_load(compose_file(container(effective)))["services"]["server"]
    inside = {"HYPERQWEN_ENGINE_ARGUMENTS": interpolated(server["environment"]["HYPERQWEN_ENGINE_ARGUMENTS"])}
    assert resolve("B", environ=inside).profile.engine.arguments == [value]
