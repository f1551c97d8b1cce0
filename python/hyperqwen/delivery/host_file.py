"""A host file made from settings that another system holds as JSON: the NixOS module's, while the host is built.

The file is read back by the code that reads it at run time, so that a wrong setting fails the build with the message
that the server would have had.
"""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import tomlkit
import tomlkit.exceptions

from hyperqwen.delivery.options import OWN_OPTIONS
from hyperqwen.delivery.unit import MODELS
from hyperqwen.errors import BadInputError, HyperqwenError
from hyperqwen.patches.files import write_atomic
from hyperqwen.profiles.capabilities import CAPABILITIES
from hyperqwen.profiles.layers import resolve
from hyperqwen.profiles.planner import make_plan
from hyperqwen.profiles.profile import knobs
from hyperqwen.profiles.rules import refusal

# A flag, the word after it where that may be its value, and whether another flag follows.
_FLAG = re.compile(r"(?<![\w-])(?P<flag>--[a-z][a-z0-9-]*)(?: (?P<value>[\w.]*\w)(?P<more> (?=--))?)?")


def render(settings: str, where: str) -> str:
    """The TOML of a host file from a JSON object of sections; `where` names the settings in messages.

    Raises BadInputError for what is no JSON object, and for null, which TOML cannot say.
    """
    try:
        data = json.loads(settings)
    except ValueError as error:
        raise BadInputError(f"{where} is not JSON: {error}", "give an object of sections") from None
    if not isinstance(data, dict):
        raise BadInputError(f"{where} is {data!r}", "give an object of sections")
    nulls = [f"{where}.{path} is null" for path in _nulls(data)]
    if nulls:
        raise BadInputError("\n".join(nulls), "leave it out to keep the profile's value")
    try:
        return tomlkit.dumps(data)
    except (tomlkit.exceptions.TOMLKitError, ValueError) as error:
        raise BadInputError(f"{where} cannot be written as TOML: {error}") from None


def make(profile: str, settings: str, where: str, out: Path) -> None:
    """Write the host file `out`, once the layers and the rules accept it over `profile`; else nothing is written.

    Raises BadInputError with all problems, each naming the setting, and MissingError for a profile that is not there.
    """
    text = render(settings, where)
    with tempfile.TemporaryDirectory(prefix="hyperqwen-") as folder:
        trial = Path(folder) / "host.toml"
        trial.write_text(text, encoding="utf-8")
        try:
            # Neither card nor engine is known: what they cannot do is said at start, what no host can do is said now.
            plan = make_plan(
                resolve(profile, host_file=trial, environ={}),
                models=Path(MODELS),
                capabilities=frozenset(CAPABILITIES),
            )
            refused = refusal(tuple(replace(notice, fix=in_settings(notice.fix, where)) for notice in plan.notices))
            if refused is not None:
                raise refused
        except BadInputError as error:
            # Whoever reads this wrote settings, and never sees the file.
            message = error.message.replace(f"host file {trial}", where).replace(str(trial), where)
            raise BadInputError(message, error.fix) from None
    write_atomic(out, text.encode())


def in_settings(fix: str, where: str) -> str:
    """`fix` with the knobs' flags as settings: --context 8192 as `where`.limits.context_tokens = 8192.

    A knob that the NixOS module has an option of its own for is that option, beside the settings.
    """
    names = {flag: knob for knob in knobs() for flag in (knob.flag, f"--{knob.alias}" if knob.alias else knob.flag)}

    def setting(match: re.Match[str]) -> str:
        knob = names.get(match["flag"])
        if knob is None:
            return match[0]
        own = OWN_OPTIONS.get(knob.path)
        name = f"{where}.{knob.path}" if own is None else f"{where.removesuffix('settings')}{own}"
        value = match["value"] or ""
        if (_is_number(value) and knob.kind in ("int", "float", "choice or int")) or value in ("true", "false"):
            said = f"{name} = {value}"
        elif value in knob.choices:
            said = f'{name} = "{value}"'
        else:
            return match[0].replace(match["flag"], name)
        return f"{said} and " if match["more"] else said

    return _FLAG.sub(setting, fix)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(?:\.\d+)?", text) is not None


def _nulls(data: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in data.items():
        if value is None:
            found.append(f"{prefix}{key}")
        elif isinstance(value, dict):
            found += _nulls(value, f"{prefix}{key}.")
    return found


@click.command()
@click.option("--profile", required=True, help="Name or file of the profile that the file lies over.")
@click.option("--settings", required=True, metavar="JSON", help="Sections with what this host has different.")
@click.option("--where", default="settings", show_default=True, help="What messages call the settings.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The file to write.")
def main(profile: str, settings: str, where: str, out: Path) -> None:
    """Write a host file from JSON, or say what is wrong with it."""
    try:
        make(profile, settings, where, out)
    except HyperqwenError as error:
        click.echo(f"hyperqwen: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
