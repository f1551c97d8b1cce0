from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperqwen.delivery.container import container
from hyperqwen.delivery.quadlet import quadlet_file
from hyperqwen.profiles.layers import Effective, resolve
from hyperqwen.profiles.profile import shipped

# podman-systemd.unit(5), podman 5: the keys of [Container] that are used here; another one makes the generator fail.
KNOWN = {
    "AddDevice", "ContainerName", "DropCapability", "Environment", "HealthCmd", "HealthInterval", "HealthOnFailure",
    "HealthRetries", "HealthStartPeriod", "HealthTimeout", "Image", "NoNewPrivileges", "Notify", "PublishPort", "Pull",
    "ReadOnly", "RunInit", "Secret", "ShmSize", "StopTimeout", "Tmpfs", "Volume",
}  # fmt: skip


def parse(text: str) -> dict[str, dict[str, list[str]]]:
    """Sections of a unit file: {section: {key: values in order}}, with specifiers resolved."""
    sections: dict[str, dict[str, list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            assert "%" not in value.replace("%%", ""), line
            section.setdefault(key, []).append(value.replace("%%", "%"))
    return sections


def quadlet(name: str = "B", **values: str) -> dict[str, dict[str, list[str]]]:
    changed = {knob.replace("__", "."): value for knob, value in values.items()}
    return parse(quadlet_file(container(resolve(name, flags=changed))))


@pytest.mark.parametrize("name", sorted(shipped()))
def test_container_has_no_privileges_and_only_this_machine_reaches_it(name: str) -> None:
    units = quadlet(name)
    found = units["Container"]
    assert set(found) <= KNOWN
    assert set(units) == {"Unit", "Container", "Service", "Install"}
    assert (found["ReadOnly"], found["DropCapability"], found["NoNewPrivileges"]) == (["true"], ["all"], ["true"])
    assert (found["RunInit"], found["Notify"]) == (["true"], ["true"])
    assert found["PublishPort"] == ["127.0.0.1:18020:18020"]
    assert found["AddDevice" if name != "demo" else "Image"] == [
        "nvidia.com/gpu=all" if name != "demo" else "localhost/hyperqwen:demo"
    ]


def test_key_is_a_secret_that_only_the_servers_user_reads() -> None:
    found = quadlet("B", server__api_key_file="/etc/key")["Container"]
    name, *options = found["Secret"][0].split(",")
    assert name == "hyperqwen-key"
    settings = dict(option.split("=") for option in options)
    assert (settings["type"], settings["uid"], settings["mode"]) == ("mount", "65532", "0400")
    assert f"HYPERQWEN_SERVER_API_KEY_FILE={settings['target']}" in found["Environment"]
    assert not any(value.startswith("HYPERQWEN_API_KEY") for value in found["Environment"])


def test_podman_ends_the_container_before_systemd_does() -> None:
    units = quadlet("B", server__drain_seconds="100", server__start_seconds="700")
    assert units["Container"]["StopTimeout"] == ["130"]
    assert int(units["Service"]["TimeoutStopSec"][0]) > 130
    assert units["Service"]["SuccessExitStatus"] == ["143"]
    assert int(units["Service"]["TimeoutStartSec"][0]) > 700
    assert units["Container"]["HealthStartPeriod"] == ["700s"]


def test_one_that_hangs_is_killed_and_started_again() -> None:
    units = quadlet("B")
    assert units["Container"]["HealthCmd"][0].startswith("/bin/hyperqwen health ")
    assert units["Container"]["HealthOnFailure"] == ["kill"]
    assert units["Container"]["Notify"] == ["true"]
    assert units["Service"]["Restart"] == ["on-failure"]


def test_folders_of_models_take_the_place_of_the_volume() -> None:
    assert "hyperqwen-models:/models:ro" in quadlet("B")["Container"]["Volume"]
    volumes = quadlet("B", model__directory="/m/50% off", model__drafter="/d")["Container"]["Volume"]
    assert volumes == [
        "/m/50% off:/models/qwen3.8-27b-fast:ro",
        "/d:/models/qwen3.8-27b-dflash2:ro",
        "hyperqwen-single-cache:/cache",
    ]
    assert quadlet("demo")["Container"]["Volume"] == ["hyperqwen-demo-cache:/cache"]


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1))
def test_any_value_arrives_as_it_was(value: str) -> None:
    effective = Effective(resolve("B").profile.with_values({"engine.arguments": [value]}), {})
    lines = parse(quadlet_file(container(effective)))["Container"]["Environment"]
    # systemd's double quotes and backslashes are a shell's here.
    (assignment,) = shlex.split(lines[1])
    variable, _, text = assignment.partition("=")
    assert resolve("B", environ={variable: text}).profile.engine.arguments == [value]
