"""`hyperqwen pins check`: whether the pin files agree with groups.toml, with each other and with the wheels' needs.

Needs no network and no store. Every problem is reported, none hides another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hyperqwen.errors import BadInputError
from hyperqwen.pins.groups import GroupsFile, load_groups
from hyperqwen.pins.model import DEB_GROUPS, WHEEL_GROUPS, Pin, PinSet, load, render
from hyperqwen.pins.requires import Needs, load_requires, walk


@dataclass
class Report:
    """`problems` is empty for a sound set; `groups` maps a group to its number of pins and bytes."""

    problems: list[str] = field(default_factory=list)
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)


def check_folder(folder: Path) -> Report:
    """Check the pin files of `folder`; an unreadable file is a problem like any other."""
    report = Report()
    loaded: dict[str, object] = {}
    for name, read in (
        ("pins", lambda: load(folder)),
        ("groups", lambda: load_groups(folder / "groups.toml")),
        ("requires", lambda: load_requires(folder / "requires.json")),
    ):
        try:
            loaded[name] = read()
        except BadInputError as error:
            report.problems.append(str(error))
    pins, groups, needs = loaded.get("pins"), loaded.get("groups"), loaded.get("requires")
    if isinstance(pins, PinSet):
        for kind in ("wheel", "deb"):
            file = folder / f"{kind}s.json"
            if file.read_text(encoding="utf-8") != render(pins, kind):
                report.problems.append(
                    f"{file}: not in canonical form (sorted, one entry a line); run `hyperqwen pins update`"
                )
        report.groups = sizes(pins)
    if isinstance(pins, PinSet) and isinstance(groups, GroupsFile) and isinstance(needs, dict):
        report.problems += problems(pins, groups, needs)
    return report


def sizes(pins: PinSet) -> dict[str, tuple[int, int]]:
    """Group → number of pins, bytes."""
    found = {}
    for name in (*WHEEL_GROUPS, *DEB_GROUPS):
        members = [pin for pin in pins.all if name in pin.groups]
        found[name] = (len(members), sum(pin.size for pin in members))
    return found


def problems(pins: PinSet, groups: GroupsFile, needs: Mapping[str, Needs]) -> list[str]:
    """Everything that does not hold between the pins, their declaration and the wheels' own requirements."""
    return [
        *_debs(pins, groups),
        *_runtime(pins, groups),
        *_wheel_files(pins, groups),
        *_recorded(pins, needs),
        *_satisfied(pins, groups, needs),
        *_python(pins, groups, needs),
        *_rules(pins, groups),
        *_cuda(pins, groups),
    ]


def _debs(pins: PinSet, groups: GroupsFile) -> Iterator[str]:
    if (pins.suite, pins.component) != (groups.suite, groups.component):
        yield f"debs.json is of {pins.suite} {pins.component}, groups.toml of {groups.suite} {groups.component}"
    for name in DEB_GROUPS:
        declared = set(groups.groups[name].debs)
        pinned = {pin.name for pin in pins.debs if name in pin.groups}
        for missing in sorted(declared - pinned):
            yield f"group {name}: {missing} is declared but not pinned; run `hyperqwen pins update --group {name}`"
        for extra in sorted(pinned - declared):
            yield f"group {name}: {extra} is pinned but not declared; add it to groups.toml or update"
    for pin in pins.debs:
        rule = groups.extract.get(pin.name)
        have = (pin.extract.member, pin.extract.path, pin.extract.store_name) if pin.extract else None
        want = (rule.member, rule.path, rule.store_name) if rule else None
        if have != want:
            yield f"{pin.name}: debs.json extracts {have}, groups.toml {want}; run `hyperqwen pins update`"


def _upstream(version: str) -> str:
    return version.rpartition(":")[2].rpartition("-")[0]


def _runtime(pins: PinSet, groups: GroupsFile) -> Iterator[str]:
    """The wheels must be for the interpreter and the libc that are pinned beside them."""
    by_name = {pin.name: pin for pin in pins.debs}
    major, minor = groups.python_minor
    python = by_name.get(f"python{major}.{minor}-minimal")
    if python is None or _upstream(python.version) != groups.python:
        have = python.version if python else "not pinned"
        yield f"groups.toml resolves for Python {groups.python}, the runtime's python{major}.{minor}-minimal is {have}"
    libc = by_name.get("libc6")
    if libc is None or _upstream(libc.version) != f"2.{groups.glibc_minor}":
        have = libc.version if libc else "not pinned"
        yield f"groups.toml resolves for glibc 2.{groups.glibc_minor}, the runtime's libc6 is {have}"


def _wheel_files(pins: PinSet, groups: GroupsFile) -> Iterator[str]:
    accepted = set(groups.tags())
    for pin in pins.wheels:
        try:
            name, version, _, tags = parse_wheel_filename(pin.file)
        except (InvalidWheelFilename, InvalidVersion) as error:
            yield f"{pin.name}: {error}"
            continue
        if name != pin.name or str(version) != str(_version(pin)):
            yield f"{pin.name}: the file {pin.file} is {name} {version}, the pin says {pin.name} {pin.version}"
        if not tags & accepted:
            yield f"{pin.name}: {pin.file} is not for CPython {groups.python} on {groups.platform}"


def _version(pin: Pin) -> Version | None:
    try:
        return Version(pin.version)
    except InvalidVersion:
        return None


def _recorded(pins: PinSet, needs: Mapping[str, Needs]) -> Iterator[str]:
    pinned = {pin.name: pin for pin in pins.wheels}
    for name, pin in pinned.items():
        if name not in needs:
            yield f"requires.json does not have {name}; run `hyperqwen pins update`"
        elif needs[name].sha256 != pin.sha256:
            yield f"requires.json has {name} from a wheel with sha256 {needs[name].sha256}, pinned is {pin.sha256}"
    for name in sorted(set(needs) - set(pinned)):
        yield f"requires.json has {name}, which is not pinned; run `hyperqwen pins update`"


def _satisfied(pins: PinSet, groups: GroupsFile, needs: Mapping[str, Needs]) -> Iterator[str]:
    versions: dict[str, set[str]] = {}
    for pin in pins.wheels:
        versions.setdefault(pin.name, set()).add(pin.version)
    for name, several in versions.items():
        if len(several) > 1:
            yield f"{name} is pinned as {' and '.join(sorted(several))}; all groups share one version"
    for group in WHEEL_GROUPS:
        members = {pin.name: pin for pin in pins.wheels if group in pin.groups}
        unknown_extras: list[str] = []

        def requirements_of(
            name: str, extra: str, members: dict[str, Pin] = members, unknown: list[str] = unknown_extras
        ) -> tuple[str, ...] | None:
            if name not in members or name not in needs:
                return None
            if extra and extra not in needs[name].extras:
                unknown.append(f"{name}[{extra}]")
                return None
            return needs[name].extras[extra] if extra else needs[name].requires

        reached = walk(groups.groups[group].inputs, groups, requirements_of, "groups.toml")
        for who, requirement in reached.asked:
            yield from _one(group, who, requirement, members)
        for extra in sorted(set(unknown_extras)):
            yield f"group {group}: requires.json does not know {extra}; run `hyperqwen pins update`"
        for name in sorted(set(members) - set(reached.extras)):
            yield f"group {group}: nothing in it needs {name}; remove the group from the pin or add an input"


def _one(group: str, who: str, requirement: Requirement, members: Mapping[str, Pin]) -> Iterator[str]:
    pin = members.get(canonicalize_name(requirement.name))
    version = _version(pin) if pin else None
    shown = f"{requirement.name}{requirement.specifier}"
    if pin is None:
        fix = f"run `hyperqwen pins update --group {group}`"
        yield f"group {group}: {who} needs {shown}, which is not pinned in the group; {fix}"
    elif version is None or not requirement.specifier.contains(version, prereleases=True):
        yield f"group {group}: {who} needs {shown}, pinned is {pin.version}"


def _python(pins: PinSet, groups: GroupsFile, needs: Mapping[str, Needs]) -> Iterator[str]:
    for pin in pins.wheels:
        wanted = needs[pin.name].python if pin.name in needs else ""
        try:
            if wanted and not SpecifierSet(wanted).contains(groups.python):
                yield f"{pin.name} {pin.version} needs Python {wanted}, the runtime is {groups.python}"
        except InvalidSpecifier:
            yield f"{pin.name}: its Requires-Python {wanted!r} is no version range"


def _rules(pins: PinSet, groups: GroupsFile) -> Iterator[str]:
    for kind, rules in (("constraint", groups.constraint), ("override", groups.override)):
        for rule in rules:
            name = canonicalize_name(rule.parsed.name)
            for pin in pins.wheels:
                version = _version(pin)
                if pin.name == name and (
                    version is None or not rule.parsed.specifier.contains(version, prereleases=True)
                ):
                    yield f"{pin.name} is pinned as {pin.version}, against the {kind} {rule.requirement} ({rule.why})"
    for pin in pins.wheels:
        if pin.name in groups.excluded:
            yield f"{pin.name} is pinned, but groups.toml excludes it"


def _cuda(pins: PinSet, groups: GroupsFile) -> Iterator[str]:
    """One CUDA major in names, local versions and the toolkit; one release among the toolkit's members."""
    cuda = groups.cuda
    exempt = {rule.package for rule in cuda.exempt}
    for pin in pins.wheels:
        majors = {
            int(found[:2]) for found in re.findall(r"(?:\A|[-_+.])cu(\d{2,3})(?![0-9])", f"{pin.name} {pin.version}")
        }
        for major in sorted(majors - {cuda.major}):
            yield f"{pin.name} {pin.version} is for CUDA {major}, the others for {cuda.major}"
        if pin.name not in cuda.members and pin.name not in ("cuda-toolkit", "cuda-bindings", "cuda-python"):
            continue
        release = ".".join(pin.version.split(".")[:2])
        if release.split(".")[0] != str(cuda.major):
            yield f"{pin.name} {pin.version} is of CUDA {release}, the others of {cuda.major}"
        elif pin.name in (*cuda.members, "cuda-toolkit") and release != cuda.toolkit and pin.name not in exempt:
            fix = "add a constraint, or an exemption with its reason"
            yield f"{pin.name} {pin.version} is not of the CUDA {cuda.toolkit} toolkit; {fix}"
    known = {pin.name for pin in pins.wheels}
    for name in sorted(exempt - known):
        yield f"cuda.exempt names {name}, which is not pinned; remove it"
