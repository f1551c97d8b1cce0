"""Outputs do not depend on who fetched the pins.

spec: ours, theirs (store paths of the same outputs, with seeded pins and with another fetcher of the same hashes).
"""

import json
import os
import sys


def main() -> None:
    with open(os.environ["specPath"]) as file:
        spec = json.load(file)
    different = [pair for pair in zip(spec["ours"], spec["theirs"], strict=True) if pair[0] != pair[1]]
    if different or not spec["ours"]:
        sys.exit("\n".join(f"{ours} is {theirs} with another fetcher" for ours, theirs in different))
    with open(os.environ["out"], "w") as file:
        file.write(f"{len(spec['ours'])} outputs are the same with another fetcher\n")


main()
