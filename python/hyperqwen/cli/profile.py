"""`hyperqwen profile`: list the profiles, and show what one comes to on this host and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from hyperqwen.cli.knobs import given_flags, knob_options
from hyperqwen.profiles.layers import Effective, redacted, resolve, shown
from hyperqwen.profiles.profile import Knob, knobs, load, shipped
from hyperqwen.runtime.keys import VARIABLE

host_file_option = click.option(
    "--host-file",
    type=click.Path(path_type=Path),
    help="TOML with this host's own values; else HYPERQWEN_HOST_FILE or /etc/hyperqwen/host.toml.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


@click.group()
def command() -> None:
    """List the profiles, and show what one comes to on this host."""


@command.command("list")
@json_option
def list_profiles(as_json: bool) -> None:
    """The profiles that ship, one a line: name, title, what it is for."""
    profiles = [load(path) for path in shipped().values()]
    if as_json:
        rows = [{"name": p.name, "title": p.title, "device": p.device, "summary": p.summary} for p in profiles]
        click.echo(json.dumps(rows, indent=2))
        return
    for profile in profiles:
        click.echo(f"{profile.name:5} {profile.title:13} {profile.summary}")


@command.command()
@click.argument("name")
@host_file_option
@click.option("--effective", is_flag=True, help="Every knob with its value and where that comes from.")
@json_option
@knob_options
@click.pass_context
def show(context: click.Context, name: str, host_file: Path | None, effective: bool, as_json: bool) -> None:
    """The profile NAME (A to E, demo, a title such as single, or a file) with every layer over it.

    Layers, the later one wins: default, profile, host file, environment, flag. Without --effective only what differs
    from the defaults is shown.
    """
    found = resolve(name, host_file=host_file, environ=os.environ, flags=given_flags(context))
    chosen = [knob for knob in knobs() if effective or found.sources[knob.path].kind != "default"]
    if as_json:
        click.echo(json.dumps(_as_json(found, chosen), indent=2))
        return
    profile = found.profile
    click.echo(f"{profile.name} ({profile.title}): {profile.summary}")
    section = ""
    for knob in chosen:
        if knob.section != section:
            section = knob.section
            click.echo(f"\n[{section}]")
        text = shown(knob, profile.get(knob.path)) or '""'
        click.echo(f"{knob.key:20} {text:34} {found.sources[knob.path]}".rstrip())
    if effective:
        click.echo(f"\n{VARIABLE:20} {redacted(os.environ.get(VARIABLE, ''))}")


def _as_json(found: Effective, chosen: list[Knob]) -> dict[str, Any]:
    return {
        "name": found.profile.name,
        "title": found.profile.title,
        "device": found.profile.device,
        "knobs": {
            knob.path: {
                "value": found.profile.get(knob.path),
                "source": found.sources[knob.path].kind,
                "where": found.sources[knob.path].where,
            }
            for knob in chosen
        },
        "api_key": redacted(os.environ.get(VARIABLE, "")),
    }
