"""Write the parts of docs that repeat what the code or the data says.

A generated part stands in a Markdown file between two lines of its own:

    <!-- generated: patch-table -->
    ...
    <!-- end generated -->

`GENERATORS` maps each name to a function that takes the checkout's root and returns the lines between; `FILES` does the
same for files that are generated as a whole.
`stale` renders every file and gives those that differ, so that a check can refuse drift; `write` brings them
up to date.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import unified_diff
from pathlib import Path
from typing import Any

import click

from hyperqwen.errors import BadInputError
from hyperqwen.patches.apply import PatchProblems
from hyperqwen.patches.files import write_atomic
from hyperqwen.patches.series import load
from hyperqwen.profiles.capabilities import CAPABILITIES, providers

WIDTH = 100
"""Columns of command help in the docs, whatever terminal writes them."""

Generator = Callable[[Path], str]

GENERATORS: dict[str, Generator] = {}
"""Name in the marker to generator; `generator` adds one."""

FILES: dict[str, Generator] = {}
"""Path in the checkout of each file that is generated as a whole, to its generator; `generated_file` adds one."""

_BEGIN = re.compile(r"<!-- generated: (\S+) -->")
_END = "<!-- end generated -->"
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def generator(name: str) -> Callable[[Generator], Generator]:
    """Register a function as the generator of the parts named `name`."""

    def register(function: Generator) -> Generator:
        if name in GENERATORS:
            raise ValueError(f"a second generator named {name!r}")
        GENERATORS[name] = function
        return function

    return register


def generated_file(path: str) -> Callable[[Generator], Generator]:
    """Register a function as the generator of the whole file `path`, where a checkout has the folder for it."""

    def register(function: Generator) -> Generator:
        FILES[path] = function
        return function

    return register


def pages(root: Path) -> list[Path]:
    """The Markdown files that may hold generated parts: the README and everything below docs/."""
    readme = root / "README.md"
    return ([readme] if readme.is_file() else []) + sorted((root / "docs").rglob("*.md"))


def render(text: str, root: Path, name: str) -> str:
    """`text` with its generated parts made anew.

    Markers inside a fenced code block are text, so that docs can show them.

    Raises:
        BadInputError: for markers that do not pair up or name no generator, with every such line of the page.
    """
    out: list[str] = []
    problems: list[str] = []
    fence: str | None = None
    begun: tuple[str, int] | None = None
    for number, line in enumerate(text.removesuffix("\n").split("\n"), 1):
        begin = _BEGIN.fullmatch(line.strip())
        if begun is not None:
            if begin is not None:
                problems.append(f"{name}:{number}: '{begin[1]}' begins before '{begun[0]}' of line {begun[1]} ends")
            elif line.strip() == _END:
                out.append(line)
                begun = None
            continue
        mark = _FENCE.match(line)
        if mark is not None and fence is None:
            fence = mark[1]
        elif mark is not None and fence is not None and mark[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = None
        out.append(line)
        if fence is not None:
            continue
        if line.strip() == _END:
            problems.append(f"{name}:{number}: '{_END}' without a beginning")
        elif begin is not None:
            begun = (begin[1], number)
            function = GENERATORS.get(begin[1])
            if function is None:
                known = ", ".join(sorted(GENERATORS))
                problems.append(f"{name}:{number}: no generator named '{begin[1]}'; there are {known}")
            elif not problems:
                out += function(root).rstrip("\n").split("\n")
    if begun is not None:
        problems.append(f"{name}:{begun[1]}: '{begun[0]}' has no '{_END}' line after it")
    if problems:
        raise BadInputError("\n".join(problems), "write each marker on a line of its own, in pairs")
    return "\n".join(out) + "\n"


def stale(root: Path) -> dict[Path, str]:
    """The pages whose generated parts are out of date, and generated files that are, with what they should be.

    Raises:
        BadInputError: for wrong markers, and for data that a generator refuses.
    """
    found: dict[Path, str] = {}
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        fresh = render(text, root, page.relative_to(root).as_posix())
        if _BEGIN.search(text) and fresh != text:
            found[page] = fresh
    for path, function in FILES.items():
        file = root / path
        if file.parent.is_dir() and (fresh := function(root)) != _committed(file):
            found[file] = fresh
    return found


def _committed(file: Path) -> str:
    """The text of a file, which is none for one that is not there yet."""
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def diffs(root: Path, found: dict[Path, str]) -> Iterator[str]:
    """A unified diff per page, from what is committed to what is generated."""
    for page, fresh in found.items():
        name = page.relative_to(root).as_posix()
        old = _committed(page).splitlines(keepends=True)
        yield "".join(unified_diff(old, fresh.splitlines(keepends=True), f"{name} (committed)", f"{name} (generated)"))


def write(root: Path) -> list[Path]:
    """Bring all pages up to date; returns those that changed. Nothing is written if a page is wrong."""
    found = stale(root)
    for page, fresh in found.items():
        write_atomic(page, fresh.encode())
    return list(found)


def table(head: list[str], rows: list[list[str]], right: tuple[int, ...] = ()) -> str:
    """A Markdown table; the columns in `right` are aligned to the right."""
    rule = ["--:" if column in right else "---" for column in range(len(head))]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *cells])


@generator("patch-table")
def patch_table(root: Path) -> str:
    """One row a patch, from the headers."""
    try:
        entries = load(root / "patches")
    except PatchProblems as error:
        raise BadInputError(f"the patch table needs a sound series:\n{error}", "run 'hyperqwen patches list'") from None
    rows = []
    for entry in entries:
        if entry.header is None:
            raise ValueError(f"{entry.name} has no header, and yet no problem")
        header = entry.header
        rows.append(
            [
                f"[{entry.name[:4]}](../patches/{entry.name})",
                header.kind,
                header.subject,
                header.reason,
                "<br>".join(f"`{seam}`" for seam in header.seams) or "none",
                "<br>".join(f"`{capability}`" for capability in header.provides) or "none",
                header.upstream,
                header.retires,
            ]
        )
    if not rows:
        return "The series is empty."
    return table(
        ["Patch", "Kind", "What it does", "Why", "Hands over to", "Provides", "Upstream", "Retires when"],
        rows,
    )


@generator("capability-table")
def capability_table(root: Path) -> str:
    """One row a capability: what it is, and the patch that provides it."""
    by_capability = providers(root / "patches")
    return table(
        ["Capability", "What the engine can do", "Patch"],
        [
            [
                f"`{name}`",
                meaning,
                ", ".join(f"[{patch[:4]}](../patches/{patch})" for patch in by_capability.get(name, ())) or "none yet",
            ]
            for name, meaning in CAPABILITIES.items()
        ],
    )


@generator("cli-help")
def cli_help(root: Path) -> str:
    """The full help of every command, depth first, as a terminal of `WIDTH` columns shows it."""
    from hyperqwen.cli import main

    with _fixed_terminal():
        return "\n".join(_help(main, "hyperqwen", None)).rstrip("\n")


@contextmanager
def _fixed_terminal() -> Iterator[None]:
    """The terminal's width and colour as argparse sees them; click is told by its context."""
    wanted = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "FORCE_COLOR": None}
    before = {name: os.environ.get(name) for name in wanted}
    _set_environment(wanted)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _help(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    settings = {
        **command.context_settings,
        "terminal_width": WIDTH,
        "max_content_width": WIDTH,
        "color": False,
    }
    context = click.Context(command, info_name=name, parent=parent, **settings)
    path = context.command_path
    text = click.unstyle(command.get_help(context)).rstrip()
    yield f"{'#' * min(6, 1 + len(path.split()))} `{path}`\n\n```text\n{text}\n```\n"
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is None:
                raise BadInputError(f"the command {path} lists {child!r}, but does not have it")
            if not found.hidden:
                yield from _help(found, child, context)


@generator("pin-table")
def pin_table(root: Path) -> str:
    """Files and bytes of each pin group; a pin in two groups counts in both, but once in the total."""
    folder = root / "nix" / "pins"
    kinds = ("wheels", "debs")
    count: Counter[tuple[str, str]] = Counter()
    size: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for kind in kinds:
        for pin in _pins(folder / f"{kind}.json", kind):
            total[kind] += 1
            total["bytes"] += pin["size"]
            for group in pin["groups"]:
                count[group, kind] += 1
                size[group] += pin["size"]
    rows = [
        [group, *(str(count[group, kind]) for kind in kinds), str(size[group]), f"{size[group] / 2**20:.1f}"]
        for group in sorted(size)
    ]
    rows.append(["all", *(str(total[kind]) for kind in kinds), str(total["bytes"]), f"{total['bytes'] / 2**20:.1f}"])
    return table(["Group", "Wheels", ".debs", "Bytes", "MiB"], rows, right=(1, 2, 3, 4))


def _pins(path: Path, key: str) -> list[dict[str, Any]]:
    try:
        pins: list[dict[str, Any]] = json.loads(path.read_bytes())[key]
        for pin in pins:
            if not (isinstance(pin["size"], int) and isinstance(pin["groups"], list)):
                raise TypeError(f"size or groups of {pin['name']}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInputError(f"{path}: cannot read the pins: {error!r}", "run 'hyperqwen pins check'") from error
    return pins


@generator("profile-table")
def profile_table(root: Path) -> str:
    """One row a profile, planned for the card that it is made for."""
    from hyperqwen.profiles.tables import profile_rows

    head = ["Profile", "For", "Context", "Slots", "Cache", "Drafts", "Pool", "Block", "Needs"]
    return table(head, profile_rows(), right=(2, 3, 6, 7))


@generator("rule-table")
def rule_table(root: Path) -> str:
    """One row a rule."""
    from hyperqwen.profiles.tables import rule_rows

    return table(["Rule", "Does", "Because"], rule_rows())


@generator("section-table")
def section_table(root: Path) -> str:
    """One row a section of knobs."""
    from hyperqwen.profiles.tables import section_rows

    return table(["Section", "About"], section_rows())


@generator("knob-table")
def knob_table(root: Path) -> str:
    """One row a knob."""
    from hyperqwen.profiles.tables import knob_rows

    return table(["Knob", "Takes", "Default", "Meaning"], knob_rows())


@generator("unit-exceptions")
def unit_exceptions(root: Path) -> str:
    """The directives of profile B's unit that say why they are what they are."""
    from hyperqwen.delivery.unit import service_config
    from hyperqwen.profiles.profile import load

    unit = service_config(load(root / "profiles" / "B.toml"), program="/bin/hyperqwen-serve")
    rows = [
        ["<br>".join(f"`{line}`" for line in directive.lines()), directive.why]
        for directives in unit.sections.values()
        for directive in directives
        if directive.why
    ]
    return table(["Directive", "Why"], rows)


@generated_file("nix/nixos/options.json")
def nixos_options(root: Path) -> str:
    """The knobs, as the NixOS module types them."""
    from hyperqwen.delivery.options import options

    return options()


@generated_file("nix/nixos/service.json")
def nixos_service(root: Path) -> str:
    """What every unit has, for the NixOS module."""
    from hyperqwen.delivery.options import service

    return service()
