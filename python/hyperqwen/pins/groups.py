"""`nix/pins/groups.toml`: what the pins are resolved from, and the rules that hold between them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from hyperqwen.errors import BadInputError
from hyperqwen.pins.model import DEB_GROUPS, WHEEL_GROUPS, Extract

# manylinux_2_N had names of its own before PEP 600.
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def _requirement(text: str) -> str:
    try:
        Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is not a requirement: {error}") from None
    return text


def _package(text: str) -> str:
    if text != canonicalize_name(text):
        raise ValueError(f"write {canonicalize_name(text)!r}")
    return text


RequirementText = Annotated[str, AfterValidator(_requirement)]
PackageName = Annotated[str, AfterValidator(_package)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Group(_Strict):
    """Either wheels, by what they are resolved from, or .debs, by name."""

    inputs: list[RequirementText] = []
    debs: list[str] = []


class Rule(_Strict):
    """A requirement that the resolver obeys, and why it must."""

    requirement: RequirementText
    why: str = Field(min_length=10)

    @property
    def parsed(self) -> Requirement:
        return Requirement(self.requirement)


class Exclusion(_Strict):
    """A package that is left out, or out of a rule, and why it may be."""

    package: PackageName
    why: str = Field(min_length=10)


class ExtractRule(_Strict):
    """Which file of a .deb enters the store in its place, and where it lies there."""

    member: str
    path: str
    store_name: str


class Cuda(_Strict):
    """One CUDA major for all wheels; one toolkit release for its `members`."""

    major: int = Field(gt=0)
    toolkit: str = Field(pattern=r"^\d+\.\d+$")
    members: list[PackageName]
    exempt: list[Exclusion] = []


class GroupsFile(_Strict):
    """The whole of groups.toml."""

    python: str = Field(pattern=r"^3\.\d+\.\d+$")
    platform: str = Field(pattern=r"^x86_64-manylinux_2_\d+$")
    suite: str
    component: Literal["main"]
    groups: dict[str, Group]
    extract: dict[str, ExtractRule] = {}
    cuda: Cuda
    constraint: list[Rule] = []
    override: list[Rule] = []
    exclude: list[Exclusion] = []

    @property
    def python_minor(self) -> tuple[int, int]:
        major, minor, _ = self.python.split(".")
        return int(major), int(minor)

    @property
    def glibc_minor(self) -> int:
        return int(self.platform.rpartition("_")[2])

    @property
    def overrides(self) -> dict[str, Requirement]:
        """Package → the requirement that stands in for everyone's."""
        return {canonicalize_name(rule.parsed.name): rule.parsed for rule in self.override}

    @property
    def excluded(self) -> frozenset[str]:
        return frozenset(rule.package for rule in self.exclude)

    def marker_environment(self) -> dict[str, str]:
        """PEP 508 markers of the runtime that the wheels are for, whatever runs this."""
        major, minor = self.python_minor
        return {
            "implementation_name": "cpython",
            "implementation_version": self.python,
            "os_name": "posix",
            "platform_machine": "x86_64",
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.python,
            "python_version": f"{major}.{minor}",
            "sys_platform": "linux",
        }

    def tags(self) -> list[Tag]:
        """Wheel tags that the runtime takes, best first."""
        platforms = []
        for minor in range(self.glibc_minor, 4, -1):
            platforms.append(f"manylinux_2_{minor}_x86_64")
            if minor in _OLD_NAMES:
                platforms.append(f"{_OLD_NAMES[minor]}_x86_64")
        platforms.append("linux_x86_64")
        major, minor = self.python_minor
        interpreter = f"cp{major}{minor}"
        return [
            *cpython_tags((major, minor), abis=[interpreter], platforms=platforms),
            *compatible_tags((major, minor), interpreter, platforms),
        ]

    def extract_rule(self, name: str, nar_sha256: str) -> Extract | None:
        """The pin's `extract` for the .deb `name`, if it has one."""
        rule = self.extract.get(name)
        return Extract(rule.member, rule.path, rule.store_name, nar_sha256) if rule else None


def load_groups(path: Path) -> GroupsFile:
    """Read and check groups.toml; raises BadInputError that names every wrong field."""
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path} cannot be read: {error.strerror}", "restore it from git") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path} is not TOML: {error}", "correct that line") from None
    try:
        groups = GroupsFile.model_validate(raw)
    except ValidationError as error:
        lines = [f"  {'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise BadInputError(f"{path}: wrong fields:\n" + "\n".join(lines), "correct these fields") from None
    problems = []
    for known, field, other in ((WHEEL_GROUPS, "inputs", "debs"), (DEB_GROUPS, "debs", "inputs")):
        for name in known:
            group = groups.groups.get(name)
            if group is None or not getattr(group, field) or getattr(group, other):
                problems.append(f"  groups.{name} must have {field!r} and nothing else")
    problems += [
        f"  groups.{name} is unknown; known: {', '.join((*WHEEL_GROUPS, *DEB_GROUPS))}"
        for name in groups.groups
        if name not in WHEEL_GROUPS and name not in DEB_GROUPS
    ]
    debs = {deb for group in groups.groups.values() for deb in group.debs}
    problems += [f"  extract.{name}: no group has that .deb" for name in groups.extract if name not in debs]
    if problems:
        raise BadInputError(f"{path}: wrong groups:\n" + "\n".join(problems), "correct these groups")
    return groups
