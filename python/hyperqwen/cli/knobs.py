"""Every knob of a profile as an option of a command, generated from the schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from hyperqwen.profiles.profile import Knob, knobs

F = TypeVar("F", bound=Callable[..., Any])

_META = "hyperqwen.knobs"
_METAVARS = {"bool": "true|false", "int": "N", "float": "X", "text": "TEXT", "list": "WORDS"}


def knob_options(function: F) -> F:
    """Add `--SECTION-KEY` (and its short name, where it has one) for each knob; `given_flags` has what was given.

    Values stay text: the layers read a flag and its twin in the environment by the same rules.
    """
    for knob in reversed(knobs()):
        names = [knob.flag] + ([f"--{knob.alias}"] if knob.alias else [])
        function = click.option(
            f"knob_{knob.section}_{knob.key}",
            *names,
            metavar=_metavar(knob),
            expose_value=False,
            callback=_collector(knob),
            help=f"{knob.description}  [env: {knob.variable}]",
        )(function)
    return function


def given_flags(context: click.Context) -> dict[str, str]:
    """Path of each knob that was given as a flag, to its text."""
    found: dict[str, str] = context.meta.setdefault(_META, {})
    return found


def _metavar(knob: Knob) -> str:
    if knob.choices:
        return "|".join((*knob.choices, "N")) if knob.kind == "choice or int" else "|".join(knob.choices)
    return _METAVARS[knob.kind]


def _collector(knob: Knob) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def collect(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            given_flags(context)[knob.path] = value

    return collect
