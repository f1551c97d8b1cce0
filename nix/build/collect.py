"""One output that needs every check, so that `nix build --dry-run` of it tells what a whole run lacks.

spec: checks ({name: path}).
"""

import json
import os

with open(os.environ["specPath"]) as file:
    checks = json.load(file)["checks"]
os.mkdir(os.environ["out"])
for name, path in sorted(checks.items()):
    os.symlink(path, f"{os.environ['out']}/{name}")
