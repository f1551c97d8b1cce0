"""No output refers to a second copy of a wheel, to a wheel file, or to what only builds.

spec: graphs ({name of an exportReferencesGraph file in the build folder: how many wheels it must hold}),
wheels ("name-version" of every pin).
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
    for graph, count in spec["graphs"].items():
        names = [path.split("-", 1)[1] for path in paths_of(graph)]
        copies = collections.Counter(name for name in names if name in wheels or name.rsplit("-", 1)[0] in wheels)
        if len(copies) < count:
            problems.append(f"{graph}: {len(copies)} wheels in its closure, {count} expected: are they still named so?")
        problems += [f"{graph}: {times} copies of {name}" for name, times in sorted(copies.items()) if times > 1]
        problems += [f"{graph}: refers to {name}" for name in names if name.endswith((".whl", ".deb"))]
        problems += [f"{graph}: refers to {name}, which only builds" for name in names if name.startswith(BUILD_ONLY)]
        report.append(f"{graph}: {len(names)} paths, {len(copies)} wheels\n")
    if problems:
        sys.exit("\n".join(problems))
    print("".join(report))
    with open(os.environ["out"], "w") as file:
        file.writelines(report)


main()
