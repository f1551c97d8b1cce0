"""Outputs do not depend on who fetched the pins.

spec: names, ours (store paths of these outputs, with seeded pins), theirs ({who fetches: the same outputs' paths}),
deb and extracted (a package, and what nixpkgs' tools took out of it), extract (what that is, as a pin says it).
"""

import json
import os
import pathlib
import sys

from hyperqwen.pins.fetch import lay_out_seed
from hyperqwen.pins.model import Extract
from hyperqwen.store import nar_sha256


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    problems = [
        f"{name} is {ours}, and {path} with {who}"
        for who, theirs in spec["theirs"].items()
        for name, ours, path in zip(spec["names"], spec["ours"], theirs, strict=True)
        if ours != path
    ]
    # The seed has a hash of its own, so what extracts it has to give the bytes that `hyperqwen fetch` gives.
    folder = pathlib.Path(os.environ["NIX_BUILD_TOP"])
    seeded = lay_out_seed(Extract(**spec["extract"]), pathlib.Path(spec["deb"]), folder)
    if nar_sha256(spec["extracted"]) != nar_sha256(seeded):
        problems.append(f"{spec['extracted']} has other bytes than {seeded}")
    if problems or not spec["names"] or not spec["theirs"]:
        sys.exit("\n".join(problems) or "nothing was compared")
    with open(os.environ["out"], "w") as file:
        file.write(f"{len(spec['names'])} outputs are the same with {' and '.join(sorted(spec['theirs']))}\n")


main()
