"""The compose file and the quadlet of a profile, as it ships.

spec: profile.
"""

import json
import os
import pathlib

from hyperqwen.delivery.compose import compose_file
from hyperqwen.delivery.container import container
from hyperqwen.delivery.quadlet import quadlet_file
from hyperqwen.profiles.layers import resolve


def main() -> None:
    with open(os.environ["specPath"]) as file:
        profile = json.load(file)["profile"]
    out = pathlib.Path(os.environ["out"])
    out.mkdir()
    found = container(resolve(profile))
    (out / "compose.yaml").write_text(compose_file(found))
    (out / f"{found.name}.container").write_text(quadlet_file(found))


main()
