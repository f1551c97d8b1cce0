"""The layers of a configuration: default, profile, host file, environment, flag. The later one wins.

A host file is TOML with the sections of a profile and only what this host has different. A variable or a flag is one
knob, as text.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.profiles.profile import Knob, Profile, knobs, parse, read_table, shipped
from hyperqwen.runtime.problems import describe

HOST_FILE = "HYPERQWEN_HOST_FILE"
HOST_FILES = ("/etc/hyperqwen/host.toml",)
OTHER_VARIABLES = frozenset(
    {
        HOST_FILE,
        "HYPERQWEN_API_KEY",
        "HYPERQWEN_CACHE_DIR",
        "HYPERQWEN_DRIVER_DIR",
        "HYPERQWEN_MODELS",
        "HYPERQWEN_PROFILE",
        "HYPERQWEN_SERVE_CONFIG",
    }
)
"""Variables of ours that are no knob's twin. HYPERQWEN_DEMO_… belongs to the demo."""

Kind = Literal["default", "profile", "host file", "environment", "flag"]
# Names and texts that only a profile file may give.
_IDENTITY = ("name", "title", "summary", "device")
_WHOLE = re.compile(r"-?[0-9]+\Z")
_NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?\Z")
_LONGEST_NUMBER = 40  # characters; int() refuses thousands with an error of its own
_TRUTH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class Source:
    """Where a value comes from: the layer, and the file, variable or flag."""

    kind: Kind
    where: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.where}".rstrip()


@dataclass(frozen=True)
class Effective:
    """A profile with every layer over it, and for each knob (by path) where its value comes from."""

    profile: Profile
    sources: Mapping[str, Source]


def resolve(
    profile: str | Path,
    *,
    host_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Effective:
    """Put the layers over the profile `profile` (a name such as "B", or a file).

    Args:
        host_file: else HYPERQWEN_HOST_FILE names it, else /etc/hyperqwen/host.toml counts where it exists.
        environ: variables, of which each HYPERQWEN_… has to be known.
        flags: path of a knob to its text.

    Raises MissingError for a profile or file that is not there; BadInputError with all problems, each with its source.
    """
    environ = environ or {}
    path = find(profile)
    data = read_table(path, "profile", "profiles/B.toml")
    # A profile has to be right by itself: else the host's values would be blamed, or would hide the mistake.
    base = parse(data, str(path))
    sources = {knob.path: Source("default") for knob in knobs()}
    sources |= {name: Source("profile", path.stem) for name in _paths(data)}
    merged = base.model_dump()

    found = _host_file(host_file, environ)
    if found is not None:
        table = read_table(found, "host file", HOST_FILES[0])
        _refuse_identity(table, found)
        # Wrong names and types are found here, by the schema, under the host file's own name.
        parse(_laid_over(base.model_dump(), table), str(found))
        merged = _laid_over(merged, table)
        sources |= {name: Source("host file", str(found)) for name in _paths(table)}

    problems: list[str] = _unknown_variables(environ)
    by_path = {knob.path: knob for knob in knobs()}
    texts = [(by_path[name], text, Source("flag", by_path[name].flag)) for name, text in (flags or {}).items()]
    texts = [
        (knob, environ[knob.variable], Source("environment", knob.variable))
        for knob in knobs()
        if knob.variable in environ
    ] + texts
    for knob, text, source in texts:
        try:
            merged[knob.section][knob.key] = read_text(knob, text)
            sources[knob.path] = source
        except BadInputError as error:
            problems.append(f"{source.where}: {error.message}; {error.fix}")
    if problems:
        raise BadInputError("\n".join(problems), "correct what is named above")
    try:
        return Effective(Profile.model_validate(merged), sources)
    except ValidationError as error:
        # Both files were right by themselves, so it is a variable or a flag.
        wrong = [str(sources.get(".".join(map(str, item["loc"][:2])), "")) for item in error.errors()]
        raise BadInputError(describe(error, Profile, ", ".join(dict.fromkeys(filter(None, wrong))))) from None


def find(profile: str | Path) -> Path:
    """The file of the profile: a shipped one by its name (in any case of letters), else that file."""
    known = shipped()
    by_name = {name.casefold(): path for name, path in known.items()}
    text = str(profile)
    if text.casefold() in by_name:
        return by_name[text.casefold()]
    path = Path(text)
    if path.suffix == ".toml" or "/" in text:
        return path
    titles = {parse(read_table(file, "profile", "B"), str(file)).title: name for name, file in known.items()}
    if text.casefold() in titles:
        return known[titles[text.casefold()]]
    near = difflib.get_close_matches(text, [*known, *titles], n=1)
    raise MissingError(
        f"there is no profile {text!r}{f'; did you mean {near[0]}?' if near else ''}",
        f"use one of {', '.join(known)}, or a file that ends in .toml",
    )


def read_text(knob: Knob, text: str) -> Any:
    """The value that `text` (of a variable or a flag) says for `knob`; ranges are the schema's to check.

    Raises BadInputError. Truth values are true, false, 1 and 0, in this spelling alone: a word that is taken for off
    because it is not known would switch off what its writer meant to switch on.
    """
    if knob.kind == "bool":
        if text in _TRUTH:
            return _TRUTH[text]
        raise BadInputError(f"{knob.path} is {text!r}", "use true or false (or 1 or 0)")
    if knob.kind == "int" or (knob.kind == "choice or int" and text not in knob.choices):
        if len(text) > _LONGEST_NUMBER:
            raise BadInputError(f"{knob.path} is a number of {len(text):,} characters", f"use {knob.accepts}")
        if _WHOLE.match(text):
            return int(text)
        near = difflib.get_close_matches(text, knob.choices, n=1)
        raise BadInputError(f"{knob.path} is {text!r}", f"did you mean {near[0]}?" if near else f"use {knob.accepts}")
    if knob.kind == "float":
        if len(text) <= _LONGEST_NUMBER and _NUMBER.match(text):
            return float(text)
        raise BadInputError(f"{knob.path} is {text!r}", f"use {knob.accepts}")
    if knob.kind == "list":
        try:
            return shlex.split(text)
        except ValueError as error:
            raise BadInputError(f"{knob.path} is {text!r}: {error}", "quote it as for a shell") from None
    if knob.kind in ("choice", "choice or int") and text not in knob.choices:
        near = difflib.get_close_matches(text, knob.choices, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(knob.choices)}"
        raise BadInputError(f"{knob.path} is {text!r}", hint)
    return text


def shown(knob: Knob, value: Any) -> str:
    """`value` as a variable or a flag would say it."""
    if knob.kind == "bool":
        return "true" if value else "false"
    if knob.kind == "list":
        return shlex.join(value)
    return str(value)


def _paths(table: Mapping[str, Any]) -> list[str]:
    return [f"{section}.{key}" for section, values in table.items() if isinstance(values, dict) for key in values]


def _laid_over(base: dict[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for section, values in table.items():
        known = merged.get(section)
        merged[section] = {**known, **values} if isinstance(known, dict) and isinstance(values, dict) else values
    return merged


def _host_file(given: Path | None, environ: Mapping[str, str]) -> Path | None:
    if given is not None:
        return given
    if HOST_FILE in environ:
        if not environ[HOST_FILE]:
            raise BadInputError(f"{HOST_FILE} is empty", f"unset it, or name a file such as {HOST_FILES[0]}")
        return Path(environ[HOST_FILE])
    return next((path for path in map(Path, HOST_FILES) if path.exists()), None)


def _refuse_identity(table: Mapping[str, Any], path: Path) -> None:
    wrong = [key for key in _IDENTITY if key in table]
    if wrong:
        raise BadInputError(
            f"{path} sets {', '.join(wrong)}, which only a profile has",
            "take it out; a host file has sections of knobs alone",
        )


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A twin that is spelled wrong would otherwise be one that does nothing."""
    known = {knob.variable for knob in knobs()} | OTHER_VARIABLES
    problems = []
    for name in sorted(environ):
        if name.startswith("HYPERQWEN_") and not name.startswith("HYPERQWEN_DEMO_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(
                f"the variable {name} is none of ours{f'; did you mean {near[0]}?' if near else ''} (unset it)"
            )
    return problems


def redacted(value: str) -> str:
    """A secret, as it may be shown: its length."""
    return f"set ({len(value)} characters)" if value else "not set"
