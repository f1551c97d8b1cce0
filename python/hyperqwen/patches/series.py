"""Read `patches/`: the order in `series`, and the header of each patch.

`series` names one patch a line, in the order in which they apply; a line that begins with `#` is a comment.
Every other file in the folder is a patch that the series names. A patch begins with its metadata, a blank line,
then the diff:

    Subject: list the processors without a shell
    Kind: fix
    Reason: the CPU worker calls lscpu through /bin/sh; a sandbox and a minimal
      image have neither
    Upstream: none known
    Retires: when upstream reads /sys
    Seam: hyperqwen.engine.processors:list_processors
    Test: checks/engine/test_processors.py, python/tests/test_engine_processors.py
    Provides: plain-processors

`Provides` may be left out; it names what an engine with this patch can do for a profile
(`hyperqwen.profiles.capabilities`).

`docs/patches.md` is generated from these headers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hyperqwen.patches.apply import Patch, PatchProblems, Problem, Reader, apply_series, scan

SERIES = "series"
PACKAGE = "vllm"
KINDS = ("plugin", "seam", "fix", "security")
FIELDS = ("Subject", "Kind", "Reason", "Upstream", "Retires", "Seam", "Test")
OPTIONAL = ("Provides",)
PATCH_NAME = re.compile(r"(\d{4})-[a-z0-9]+(?:-[a-z0-9]+)*\.patch")

_FIELD = re.compile(r"([A-Za-z][A-Za-z-]*):(?:[ \t]+(.*))?")
_SEAM = re.compile(r"(hyperqwen\.engine(?:\.[A-Za-z_]\w*)+):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)")
_TEST = re.compile(r"((?:python/tests|checks)/[^:\s]+)(?:::([A-Za-z_]\w*))?")
_CAPABILITY = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*")
_SUBJECT_LENGTH = 100


@dataclass(frozen=True, slots=True)
class Seam:
    """A function or class of ours that a patch hands over to."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


@dataclass(frozen=True, slots=True)
class TestRef:
    """A test file below the repository, and the test in it if one is named."""

    path: str
    name: str | None = None

    # pytest collects classes by the prefix "Test".
    __test__ = False

    def __str__(self) -> str:
        return self.path if self.name is None else f"{self.path}::{self.name}"


@dataclass(frozen=True, slots=True)
class Header:
    """The metadata of a patch. `retires` is without its leading "when"; `upstream` may be "none known".

    provides: names of capabilities; whether they are known is for `check` and `profiles.capabilities` to say.
    """

    subject: str
    kind: str
    reason: str
    upstream: str
    retires: str
    seams: tuple[Seam, ...]
    tests: tuple[TestRef, ...]
    provides: tuple[str, ...] = ()
    lines: tuple[tuple[str, int], ...] = ()

    def line(self, field: str) -> int | None:
        """The line of the patch at which a field stands, for a message."""
        return dict(self.lines).get(field)


@dataclass(frozen=True, slots=True)
class Entry:
    """A patch of the series; `header` is None where it has problems."""

    name: str
    patch: Patch
    header: Header | None


@dataclass(frozen=True, slots=True)
class Series:
    """The patches in order. `problems` is what is wrong with the folder and the headers, not the diffs."""

    folder: Path
    entries: tuple[Entry, ...]
    problems: tuple[Problem, ...]

    @property
    def patches(self) -> tuple[Patch, ...]:
        return tuple(entry.patch for entry in self.entries)

    @property
    def all_problems(self) -> tuple[Problem, ...]:
        return self.problems + tuple(problem for entry in self.entries for problem in entry.patch.problems)

    def until(self, name: str) -> Series:
        """The series up to, but without, the patch `name`."""
        names = [entry.name for entry in self.entries]
        return Series(self.folder, self.entries[: names.index(name)], self.problems)


def parse_header(lines: Sequence[str], patch: str) -> tuple[Header | None, list[Problem]]:
    """Parse the text before a patch's first diff line.

    Returns:
        The header, or None where a field is missing or wrong, and every problem.
    """
    problems: list[Problem] = []
    values: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    current: str | None = None
    body = list(lines)
    while body and not body[-1].strip():
        body.pop()
    for number, line in enumerate(body, 1):
        match = _FIELD.fullmatch(line)
        if match is not None:
            current = match[1]
            if current not in (*FIELDS, *OPTIONAL):
                problems.append(
                    Problem(
                        patch,
                        f"unknown field {current!r}",
                        line=number,
                        expected="one of " + ", ".join((*FIELDS, *OPTIONAL)),
                    )
                )
            elif current in values:
                problems.append(Problem(patch, f"a second {current!r} field", line=number))
            if current not in values:
                values[current], numbers[current] = [], number
            if match[2]:
                values[current].append(match[2].strip())
        elif line[:1] in (" ", "\t") and line.strip() and current is not None:
            values[current].append(line.strip())
        else:
            problems.append(
                Problem(
                    patch,
                    "not a header line",
                    line=number,
                    expected="'Field: value', or an indented line that goes on",
                    found=repr(line),
                )
            )

    text = {field: " ".join(parts) for field, parts in values.items()}
    missing = [field for field in FIELDS if field not in text]
    if missing:
        problems.append(
            Problem(
                patch,
                "missing from the header: " + ", ".join(missing),
                line=1,
                hint="docs/adding-a-patch.md shows one",
            )
        )

    def wrong(field: str, what: str, expected: str) -> None:
        problems.append(
            Problem(patch, f"{field}: {what}", line=numbers[field], expected=expected, found=repr(text[field]))
        )

    for field in (*FIELDS, *OPTIONAL):
        if field in text and not text[field]:
            wrong(field, "no value", "some text")
    if len(values.get("Subject", ())) > 1 or len(text.get("Subject", "")) > _SUBJECT_LENGTH:
        wrong("Subject", "too long", f"one line of at most {_SUBJECT_LENGTH} characters")
    if text.get("Kind") and text["Kind"] not in KINDS:
        wrong("Kind", "unknown", "one of " + ", ".join(KINDS))
    if text.get("Retires") and not re.fullmatch(r"when \S.*", text["Retires"]):
        wrong("Retires", "not a condition", "'when ...'")

    seams: list[Seam] = []
    if text.get("Seam") and text["Seam"] != "none":
        for part in text["Seam"].split(","):
            found = _SEAM.fullmatch(part.strip())
            if found is None:
                wrong("Seam", "not a function of the engine", "hyperqwen.engine.MODULE:FUNCTION, ... or none")
                break
            seams.append(Seam(found[1], found[2]))
    if text.get("Kind") == "seam" and text.get("Seam") == "none":
        wrong("Seam", "a patch of kind 'seam' names what it hands over to", "hyperqwen.engine.MODULE:FUNCTION")

    tests: list[TestRef] = []
    for part in filter(None, text.get("Test", "").split(",")):
        found = _TEST.fullmatch(part.strip())
        if found is None or any(piece in ("", ".", "..") for piece in found[1].split("/")):
            wrong("Test", "not a test of this repository", "python/tests/FILE[::TEST] or checks/FILE, ...")
            break
        tests.append(TestRef(found[1], found[2]))
    if tests and not any(test.path.startswith("checks/") for test in tests):
        wrong("Test", "none of these sees vLLM, and so none fails without the patch", "a test below checks/, too")

    provides = [part.strip() for part in text["Provides"].split(",")] if text.get("Provides") else []
    if not all(map(_CAPABILITY.fullmatch, provides)):
        wrong("Provides", "not names of capabilities", "small-letters-and-hyphens, with commas between")
    elif len(set(provides)) < len(provides):
        wrong("Provides", "a name stands twice", "each once")

    if problems:
        return None, problems
    header = Header(
        subject=text["Subject"],
        kind=text["Kind"],
        reason=text["Reason"],
        upstream=text["Upstream"],
        retires=text["Retires"].removeprefix("when ").strip(),
        seams=tuple(seams),
        tests=tuple(tests),
        provides=tuple(provides),
        lines=tuple(numbers.items()),
    )
    return header, []


def names_in(text: str) -> list[tuple[int, str]]:
    """Line numbers and names of a series file, comments and blank lines left out."""
    lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def read_series(folder: Path) -> Series:
    """Read the folder of patches, wrong as it may be: see `Series.problems` and each patch's own.

    Raises:
        PatchProblems: if there is no readable series file.
    """
    path = folder / SERIES
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PatchProblems([Problem(SERIES, f"cannot read {path}: {error}")]) from error

    problems: list[Problem] = []
    entries: list[Entry] = []
    listed: dict[str, int] = {}
    last = 0
    for number, name in names_in(text):
        match = PATCH_NAME.fullmatch(name)
        if match is None:
            problems.append(
                Problem(
                    SERIES,
                    "not a patch name",
                    line=number,
                    expected="0001-short-name.patch",
                    found=repr(name),
                )
            )
            continue
        if name in listed:
            problems.append(Problem(SERIES, f"{name} is listed a second time, after line {listed[name]}", line=number))
            continue
        listed[name] = number
        if int(match[1]) <= last:
            problems.append(
                Problem(
                    SERIES,
                    "the numbers do not rise",
                    line=number,
                    expected=f"a number after {last:04}",
                    found=name,
                )
            )
        last = max(last, int(match[1]))
        if (folder / name).is_symlink():
            problems.append(Problem(SERIES, f"{name} is a symbolic link", line=number))
            continue
        try:
            data = (folder / name).read_bytes()
        except OSError as error:
            problems.append(Problem(SERIES, f"cannot read {name}: {error.strerror or error}", line=number))
            continue
        patch = scan(data, name)
        header, found = parse_header(patch.header, name)
        problems += found
        # The tree lies among every other wheel's modules: a new file beside it would be imported like one of theirs.
        problems += [
            Problem(name, "the file is not vLLM's", line=file.line, file=file.path, expected=f"a path below {PACKAGE}/")
            for file in patch.files
            if file.sound and not file.path.startswith(f"{PACKAGE}/")
        ]
        entries.append(Entry(name, patch, header))

    for child in sorted(folder.iterdir(), key=lambda child: child.name):
        if child.name == SERIES or child.name in listed:
            continue
        problems.append(
            Problem(
                SERIES,
                f"{child.name} lies beside the series, which does not list it",
                hint="add its name to patches/series, or remove it",
            )
        )
    return Series(folder, tuple(entries), tuple(problems))


def load(folder: str | Path) -> list[Entry]:
    """The entries of a folder of patches, in order.

    Raises:
        PatchProblems: with everything that is wrong with the folder, the headers and the diffs.
    """
    series = read_series(Path(folder))
    if series.all_problems:
        raise PatchProblems(series.all_problems)
    return list(series.entries)


def apply_folder(folder: str | Path, read: Reader) -> dict[str, bytes | None]:
    """Apply a whole `patches/` folder: `read_series` and `apply_series` with one report of everything.

    This is what a builder calls. `read` reads the tree (`files.tree_reader`); the result is what to write
    over it.

    Raises:
        PatchProblems: with the problems of the folder, the headers, the diffs and the tree.
    """
    series = read_series(Path(folder))
    changes: dict[str, bytes | None] = {}
    problems = list(series.problems)
    try:
        changes = apply_series(read, series.patches)
    except PatchProblems as error:
        problems += error.problems
    if problems:
        raise PatchProblems(problems)
    return changes


def find_repository(start: Path) -> Path | None:
    """The nearest folder at or above `start` that holds `patches/series`."""
    for folder in (start, *start.parents):
        if (folder / "patches" / SERIES).is_file():
            return folder
    return None


def next_name(series: Series, name: str) -> str:
    """The file name of a new patch at the end of the series: `name` may lack the number and the suffix.

    Raises:
        ValueError: if the name is not one, is taken, or its number is not after the last one's.
    """
    stem = PurePosixPath(name).name.removesuffix(".patch")
    last = max((int(entry.name[:4]) for entry in series.entries), default=0)
    full = f"{stem}.patch" if re.match(r"\d{4}-", stem) else f"{last + 1:04}-{stem}.patch"
    match = PATCH_NAME.fullmatch(full)
    if match is None or "/" in name:
        raise ValueError(f"patch name {name!r}: expected [NNNN-]short-name, of a-z, 0-9 and single hyphens")
    if (series.folder / full).exists():
        raise ValueError(f"patch name {name!r}: {full} exists already; change it with 'hyperqwen patches refresh'")
    if int(match[1]) <= last:
        raise ValueError(f"patch name {name!r}: the number must come after {last:04}, the last in the series")
    return full
