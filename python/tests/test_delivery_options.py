"""What the NixOS module reads: every knob with a type that Nix can hold it to, and the unit's own directives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hyperqwen import docs, share
from hyperqwen.delivery import options
from hyperqwen.delivery.unit import MODELS, Directive, service_config
from hyperqwen.profiles.profile import knobs, load, sections, shipped
from hyperqwen.runtime.keys import CREDENTIAL

TREE: dict[str, Any] = json.loads(options.options())
SERVICE: dict[str, Any] = json.loads(options.service())


def test_every_knob_is_there_in_its_section() -> None:
    names = [f"{section}.{key}" for section, table in TREE.items() for key in table["knobs"]]
    assert names == [knob.path for knob in knobs()]
    assert {section: table["description"] for section, table in TREE.items()} == sections()
    assert all(table["description"] for table in TREE.values())


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: knob.path)
def test_a_knob_has_what_its_type_in_nix_needs(knob: Any) -> None:
    option = TREE[knob.section]["knobs"][knob.key]
    assert option["default"] == knob.default
    assert option["description"] == knob.description
    # module.nix's knobType: whole numbers by both ends, or from 0, or from 1; fractions by both ends.
    if knob.kind == "int":
        assert "maximum" in option or option["minimum"] in (0, 1)
    elif knob.kind == "choice or int":
        assert (option["minimum"], "maximum" in option) == (1, True)
        assert option["choices"]
    elif knob.kind == "float":
        assert option["minimum"] < option["maximum"]
    elif knob.kind == "choice":
        assert option["choices"] == list(knob.choices)
    else:
        assert knob.kind in ("bool", "text", "list")
        assert not {"choices", "minimum", "maximum"} & set(option)


def test_knobs_with_an_option_of_their_own() -> None:
    found = {
        f"{section}.{key}": option["own_option"]
        for section, table in TREE.items()
        for key, option in table["knobs"].items()
        if "own_option" in option
    }
    assert found == options.OWN_OPTIONS
    module = (share.folder("profiles").parent / "nix/nixos/module.nix").read_text()
    assert all(f"    {name} = mkOption {{" in module for name in found.values())


@pytest.mark.parametrize("name", shipped())
def test_unit_and_service_are_those_of_every_profile(name: str) -> None:
    profile = load(shipped()[name])
    unit = service_config(profile, program="/bin/hyperqwen-serve")
    shared = SERVICE["service"][profile.device]
    service: dict[str, Directive] = {directive.key: directive for directive in unit.sections["Service"]}
    assert {key: directive.value for key, directive in service.items() if key in shared} == shared
    of_an_instance = {"ExecStart", "EnvironmentFile", "Environment", "StateDirectory", "CacheDirectory"}
    of_an_instance |= {"RuntimeDirectory", "LoadCredential", "TimeoutStartSec", "TimeoutStopSec"}
    if profile.device == "cuda":
        of_an_instance.add("ExecStartPre")
    assert set(service) - set(shared) == of_an_instance
    wanted = SERVICE["unit"][profile.device]
    assert str(unit.get("Unit", "After")).split() == wanted["after"]
    assert wanted["unitConfig"]["StartLimitBurst"] == unit.get("Unit", "StartLimitBurst")
    assert ("wants" in wanted) == (profile.device == "cuda")


def test_names_that_both_sides_share() -> None:
    assert (SERVICE["credential"], SERVICE["models"]) == (CREDENTIAL, MODELS)


def test_files_are_generated_where_a_checkout_has_their_folder(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    assert docs.stale(tmp_path) == {}
    (tmp_path / "nix/nixos").mkdir(parents=True)
    files = [tmp_path / options.OPTIONS_FILE, tmp_path / options.SERVICE_FILE]
    assert "+++ nix/nixos/options.json (generated)" in "".join(docs.diffs(tmp_path, docs.stale(tmp_path)))
    assert docs.write(tmp_path) == files
    assert [file.read_text() for file in files] == [options.options(), options.service()]
    files[0].write_text(files[0].read_text().replace("65536", "65537"))
    assert list(docs.stale(tmp_path)) == files[:1]
