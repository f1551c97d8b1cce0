"""What the NixOS module reads of the schema and of the unit: `nix/nixos/options.json` and `nix/nixos/service.json`.

Nix cannot ask Python while it evaluates, so both files are committed; `hyperqwen docs write` makes them and
`hyperqwen docs check` refuses them when they have drifted.
"""

from __future__ import annotations

import json
from typing import Any

from hyperqwen.delivery.unit import (
    GPU_WAIT_SECONDS,
    MODELS,
    START_MARGIN_SECONDS,
    STOP_MARGIN_SECONDS,
    Device,
    nixos_service_config,
    service_config,
)
from hyperqwen.profiles.profile import Knob, Profile, knobs, load, sections, shipped
from hyperqwen.runtime.keys import CREDENTIAL

OPTIONS_FILE = "nix/nixos/options.json"
SERVICE_FILE = "nix/nixos/service.json"

OWN_OPTIONS = {
    "server.host": "host",
    "server.port": "port",
    "server.api_key_file": "apiKeyFile",
    "parallel.gpus": "gpus",
}
"""Knobs that are options of the module itself, beside `settings`: it has to know them, not just to hand them on."""

DEVICES: tuple[Device, ...] = ("cuda", "cpu")


def options() -> str:
    """The text of options.json: each section's description, and its knobs by key."""
    tree: dict[str, Any] = {name: {"description": text, "knobs": {}} for name, text in sections().items()}
    for knob in knobs():
        tree[knob.section]["knobs"][knob.key] = _option(knob)
    return _text(tree)


def service() -> str:
    """The text of service.json: [Unit] and [Service] by device, and names and seconds that both sides share."""
    return _text(
        {
            "credential": CREDENTIAL,
            "gpu_wait_seconds": GPU_WAIT_SECONDS,
            "models": MODELS,
            "start_margin_seconds": START_MARGIN_SECONDS,
            "stop_margin_seconds": STOP_MARGIN_SECONDS,
            "service": {device: nixos_service_config(device) for device in DEVICES},
            "unit": {device: _unit(_example(device)) for device in DEVICES},
        }
    )


def _option(knob: Knob) -> dict[str, Any]:
    option: dict[str, Any] = {"kind": knob.kind, "default": knob.default, "description": knob.description}
    if knob.choices:
        option["choices"] = list(knob.choices)
    if knob.minimum is not None:
        option["minimum"] = knob.minimum
    if knob.maximum is not None:
        option["maximum"] = knob.maximum
    if knob.path in OWN_OPTIONS:
        option["own_option"] = OWN_OPTIONS[knob.path]
    return option


def _unit(profile: Profile) -> dict[str, Any]:
    """What the [Unit] section of every profile on that device says, keys that occur twice as lists."""
    unit: dict[str, Any] = {}
    for directive in service_config(profile, program="/bin/hyperqwen-serve", key=None).sections["Unit"]:
        if directive.key in ("Wants", "After"):
            unit.setdefault(directive.key.lower(), []).extend(str(directive.value).split())
        elif directive.key != "Description":
            unit.setdefault("unitConfig", {})[directive.key] = directive.value
    return unit


def _example(device: Device) -> Profile:
    return next(profile for profile in map(load, shipped().values()) if profile.device == device)


def _text(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
