"""The plan of every shipped profile as NAME.json, for the card that it is made for: `hyperqwen plan --json`."""

import json
import os
import pathlib

from hyperqwen.profiles.profile import shipped
from hyperqwen.profiles.tables import planned

out = pathlib.Path(os.environ["out"])
out.mkdir()
for name in shipped():
    (out / f"{name}.json").write_text(json.dumps(planned(name).report(), indent=2, sort_keys=True, default=str) + "\n")
