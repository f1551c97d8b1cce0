"""No output refers to a second copy of a wheel, to a wheel file, or to what only builds.

spec: graphs (names of exportReferencesGraph files in the build folder), wheels ("name-version" of every pin).
"""

import collections
import json
import os
import sys

BUILD_ONLY = ("stage-python", "gcc-12")


def paths_of(graph: str) -> list[str]:
    """Store paths of one exportReferencesGraph file: path, deriver, count, that many references."""
    with open(graph) as file:
        lines = [line.rstrip("\n") for line in file]
    paths, at = [], 0
    while at < len(lines):
        paths.append(lines[at])
        at += 3 + int(lines[at + 2])
    return paths


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    wheels = set(spec["wheels"])
    report, problems = [], []
    for graph in spec["graphs"]:
        names = [path.split("-", 1)[1] for path in paths_of(graph)]
        copies = collections.Counter(name for name in names if name in wheels or name.rsplit("-", 1)[0] in wheels)
        if not copies:
            problems.append(f"{graph}: no wheel in its closure")
        problems += [f"{graph}: {count} copies of {name}" for name, count in sorted(copies.items()) if count > 1]
        problems += [f"{graph}: refers to {name}" for name in names if name.endswith((".whl", ".deb"))]
        problems += [f"{graph}: refers to {name}, which only builds" for name in names if name.startswith(BUILD_ONLY)]
        report.append(f"{graph}: {len(names)} paths, {len(copies)} wheels\n")
    if problems:
        sys.exit("\n".join(problems))
    print("".join(report))
    with open(os.environ["out"], "w") as file:
        file.writelines(report)


main()
