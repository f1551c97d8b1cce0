"""A Python environment in the store: a venv whose site-packages are links to unpacked wheels.

spec: runtime (path), python ("3.11"), sources (unpacked trees in precedence order), real (top-level names whose files
are linked one by one), ignored (top-level files that several wheels ship by accident).

A directory that one source alone has is linked as a whole; where sources meet, a real directory holds their links. The
libraries of a `real` name look for another wheel's by $ORIGIN/.., which leaves through a linked directory. Two
sources that give one path different bytes are an error: nothing is shadowed.
"""

import configparser
import filecmp
import json
import os
import sys

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)

OUT = os.environ["out"]
SITE = f"{OUT}/lib/python{spec['python']}/site-packages"
PYTHON = f"{OUT}/bin/python3"
problems: list[str] = []


def owners_of(sources: list[str], skipped: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """Every name that the directories `sources` hold, sorted, with its paths; without those that `skipped` starts."""
    owners: dict[str, list[str]] = {}
    for source in sources:
        for name in os.listdir(source):
            if not name.startswith(skipped):
                owners.setdefault(name, []).append(f"{source}/{name}")
    return sorted(owners.items())


def merge(sources: list[str], target: str, real: bool, skipped: tuple[str, ...] = ()) -> None:
    """Link what the directories `sources` hold into `target`, recursing where more than one has a name."""
    os.makedirs(target, exist_ok=True)
    for name, paths in owners_of(sources, skipped):
        link(paths, f"{target}/{name}", real)


def link(paths: list[str], destination: str, real: bool, skipped: tuple[str, ...] = ()) -> None:
    """Link one name: a directory as a whole if it is the only one and not `real`, a file if all its owners agree."""
    directories = [path for path in paths if os.path.isdir(path)]
    if directories and len(directories) != len(paths):
        problems.append(f"{destination}: a directory in {directories[0]}, a file elsewhere: {paths}")
    elif directories and (real or skipped or len(directories) > 1):
        merge(directories, destination, real, skipped)
    elif directories:
        os.symlink(paths[0], destination)
    else:
        for other in paths[1:]:
            if not filecmp.cmp(paths[0], other, shallow=False):
                problems.append(f"{destination}: {paths[0]} and {other} differ")
        # To where the bytes are, not to another environment's link to them.
        os.symlink(os.path.realpath(paths[0]), destination)


def merge_site(sources: list[str]) -> None:
    """site-packages: names in `real` go file by file; `ignored` modules are left out, and their byte code with them."""
    os.makedirs(SITE)
    modules = tuple(spec["ignored"])
    codes = tuple(module.removesuffix("py") for module in modules)
    for name, paths in owners_of([f"{source}/site" for source in sources], modules):
        link(paths, f"{SITE}/{name}", name in spec["real"], codes if name == "__pycache__" else ())


def write_program(name: str, text: bytes) -> None:
    path = f"{OUT}/bin/{name}"
    if os.path.lexists(path):
        os.remove(path)
    with open(path, "wb") as file:
        file.write(text)
    os.chmod(path, 0o755)


def programs_of(source: str) -> None:
    """Scripts shipped by the wheel, with our interpreter, and one launcher per console entry point."""
    if os.path.isdir(f"{source}/bin"):
        for name in sorted(os.listdir(f"{source}/bin")):
            with open(f"{source}/bin/{name}", "rb") as file:
                body = file.read()
            if body.startswith(b"#!python"):
                write_program(name, b"#!" + PYTHON.encode() + b"\n" + body.split(b"\n", 1)[1])
            elif not os.path.lexists(f"{OUT}/bin/{name}"):
                os.symlink(f"{source}/bin/{name}", f"{OUT}/bin/{name}")
    for info in sorted(os.listdir(f"{source}/site")):
        entries = f"{source}/site/{info}/entry_points.txt"
        if not info.endswith(".dist-info") or not os.path.exists(entries):
            continue
        parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read(entries)
        for name, target in sorted(parser.items("console_scripts")) if parser.has_section("console_scripts") else []:
            module, _, function = target.split("[")[0].strip().partition(":")
            write_program(
                name,
                # -I: what the caller's PYTHONPATH holds is not what was built and tested.
                f"#!{PYTHON} -I\nimport sys\n\nfrom {module} import {function.split('.')[0]}\n\n"
                f"sys.exit({function}())\n".encode(),
            )


def main() -> None:
    runtime, version = spec["runtime"], spec["python"]
    os.makedirs(f"{OUT}/bin")
    os.symlink(f"{runtime}/bin/python{version}", PYTHON)
    for name in (f"python{version}", "python"):
        os.symlink("python3", f"{OUT}/bin/{name}")
    with open(f"{OUT}/pyvenv.cfg", "w") as file:
        file.write(f"home = {runtime}/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    # An environment is itself a source of the next one: what changes often lies over what does not.
    os.symlink(f"lib/python{version}/site-packages", f"{OUT}/site")
    merge_site(spec["sources"])
    for source in spec["sources"]:
        programs_of(source)
    for part in ("data", "include"):
        trees = [f"{source}/{part}" for source in spec["sources"] if os.path.isdir(f"{source}/{part}")]
        for tree in trees:
            merge_data(tree, OUT if part == "data" else f"{OUT}/include")
    if problems:
        sys.exit("\n".join(problems))


def merge_data(tree: str, target: str) -> None:
    """A wheel's data/ lands in the environment's root, beside what is there already."""
    os.makedirs(target, exist_ok=True)
    for name in sorted(os.listdir(tree)):
        source, destination = f"{tree}/{name}", f"{target}/{name}"
        if os.path.isdir(source):
            merge_data(source, destination)
        elif not os.path.lexists(destination):
            os.symlink(source, destination)
        elif not filecmp.cmp(source, destination, shallow=False):
            problems.append(f"{destination}: {source} and {os.path.realpath(destination)} differ")


main()
