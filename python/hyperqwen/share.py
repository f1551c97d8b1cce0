"""The data that the code acts on: profiles, geometries and the patch series, beside the package or in a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hyperqwen.errors import MissingError

Folder = Literal["profiles", "models", "patches"]
# Where a checkout keeps what an installed package has under share/.
_IN_CHECKOUT = {"profiles": "profiles", "models": "prepare/models", "patches": "patches"}


def folder(name: Folder) -> Path:
    """The folder of that data; raises MissingError for a package that was installed without it."""
    package = Path(__file__).resolve().parent
    places = (package / "share" / name, package.parents[1] / _IN_CHECKOUT[name])
    for place in places:
        if place.is_dir():
            return place
    raise MissingError(
        f"the {name} are in neither {places[0]} nor {places[1]}", "use `./hq run .#hyperqwen`, or run from a checkout"
    )
