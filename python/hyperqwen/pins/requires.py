"""`nix/pins/requires.json`: what each pinned wheel requires, as its METADATA says, so that the check needs no network.

Of each wheel are kept: its Requires-Python, the requirements that hold on the runtime without an extra, and those of
each extra that some other wheel of the set asks for.
"""

from __future__ import annotations

import email.parser
import email.policy
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from hyperqwen.errors import BadInputError
from hyperqwen.pins.groups import GroupsFile
from hyperqwen.pins.model import SCHEMA


@dataclass(frozen=True)
class Needs:
    """The requirements of one wheel; `sha256` is that of the wheel that they were read from."""

    sha256: str
    python: str = ""
    requires: tuple[str, ...] = ()
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Metadata:
    """The parts of a METADATA file that resolution looks at, unfiltered."""

    python: str
    requires: tuple[str, ...]


def parse_metadata(text: str, of: str) -> Metadata:
    """Read a METADATA file; raises BadInputError naming the wheel `of` for a requirement that is none."""
    message = email.parser.Parser(policy=email.policy.compat32).parsestr(text, headersonly=True)
    requires = tuple(str(value) for value in message.get_all("Requires-Dist", []))
    for requirement in requires:
        try:
            Requirement(requirement)
        except InvalidRequirement:
            raise BadInputError(f"{of}: METADATA requires {requirement!r}, which is no requirement") from None
    return Metadata(str(message.get("Requires-Python", "") or ""), requires)


def active(requires: Iterable[str], groups: GroupsFile, extra: str = "") -> Iterator[str]:
    """Those of `requires` that hold on the runtime, with `extra` if given and only because of it."""
    base = groups.marker_environment()
    for text in requires:
        marker = Requirement(text).marker
        plain = marker is None or marker.evaluate({**base, "extra": ""})
        if plain if not extra else (not plain and marker is not None and marker.evaluate({**base, "extra": extra})):
            yield text


@dataclass
class Walk:
    """What a group reaches: package → extras asked of it, and who asked for what."""

    extras: dict[str, set[str]] = field(default_factory=dict)
    asked: list[tuple[str, Requirement]] = field(default_factory=list)


def walk(
    inputs: Iterable[str], groups: GroupsFile, requirements_of: Callable[[str, str], Iterable[str] | None], asker: str
) -> Walk:
    """Follow `inputs` through `requirements_of(package, extra)` (None: not pinned), with overrides and exclusions."""
    found = Walk()
    todo: list[tuple[str, Requirement]] = [(asker, Requirement(text)) for text in inputs]
    while todo:
        who, requirement = todo.pop(0)
        name = canonicalize_name(requirement.name)
        if name in groups.excluded:
            continue
        override = groups.overrides.get(name)
        if override is not None:
            extras = requirement.extras
            requirement = Requirement(str(override))
            requirement.extras |= extras
        found.asked.append((who, requirement))
        for extra in ["", *sorted(requirement.extras)]:
            if extra in found.extras.setdefault(name, set()):
                continue
            found.extras[name].add(extra)
            child = f"{name}[{extra}]" if extra else name
            todo += [(child, Requirement(text)) for text in requirements_of(name, extra) or ()]
    return found


def condense(metadata: Mapping[str, Metadata], hashes: Mapping[str, str], groups: GroupsFile) -> dict[str, Needs]:
    """requires.json's content from the METADATA of every wheel (by normalised name)."""
    wanted: dict[str, set[str]] = {}

    def requirements_of(name: str, extra: str) -> list[str] | None:
        return list(active(metadata[name].requires, groups, extra)) if name in metadata else None

    for name, group in groups.groups.items():
        for package, extras in walk(group.inputs, groups, requirements_of, f"group {name}").extras.items():
            wanted.setdefault(package, set()).update(extras - {""})
    return {
        name: Needs(
            sha256=hashes[name],
            python=data.python,
            requires=tuple(active(data.requires, groups)),
            extras={extra: tuple(active(data.requires, groups, extra)) for extra in sorted(wanted.get(name, ()))},
        )
        for name, data in metadata.items()
    }


def render_requires(needs: Mapping[str, Needs]) -> str:
    """The text of requires.json: one wheel a line, sorted by name."""
    rows = []
    for name in sorted(needs):
        entry: dict[str, Any] = {"sha256": needs[name].sha256}
        if needs[name].python:
            entry["python"] = needs[name].python
        if needs[name].requires:
            entry["requires"] = list(needs[name].requires)
        if needs[name].extras:
            entry["extras"] = {extra: list(texts) for extra, texts in needs[name].extras.items()}
        rows.append(f"    {json.dumps(name)}: {json.dumps(entry)}")
    return f'{{\n  "schema": {SCHEMA},\n  "wheels": {{\n' + ",\n".join(rows) + "\n  }\n}\n"


def load_requires(path: Path) -> dict[str, Needs]:
    """Read requires.json; raises BadInputError."""
    fix = "run `hyperqwen pins update`"
    try:
        top = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}", fix) from None
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON: {error}", fix) from None
    if not isinstance(top, dict) or top.get("schema") != SCHEMA or not isinstance(top.get("wheels"), dict):
        raise BadInputError(f"{path} must hold 'schema': {SCHEMA} and an object 'wheels'", fix)
    needs: dict[str, Needs] = {}
    for name, entry in top["wheels"].items():
        try:
            needs[name] = Needs(
                sha256=_text(entry["sha256"]),
                python=_text(entry.get("python", "")),
                requires=_requirements(entry.get("requires", [])),
                extras={str(extra): _requirements(texts) for extra, texts in entry.get("extras", {}).items()},
            )
        except (KeyError, TypeError, AttributeError, ValueError, InvalidRequirement) as error:
            raise BadInputError(f"{path}: the entry of {name!r} is malformed: {error}", fix) from None
    return needs


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not text")
    return value


def _requirements(values: object) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r} is not a list")
    return tuple(str(Requirement(_text(value)) and value) for value in values)
