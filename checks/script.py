"""A script of checks/ that is also run by hand, in the environment that this interpreter belongs to.

spec: root (the repository), script (path in it).
"""

import json
import os
import subprocess
import sys

with open(os.environ["specPath"]) as spec_file:
    spec = json.load(spec_file)
sys.path.insert(0, f"{spec['root']}/checks")

from pytest_run import environment, repository


def main() -> None:
    copy = repository(spec["root"])
    # The engine's own copy of our package is what runs, not the sources.
    variables = {key: value for key, value in environment({}, copy).items() if key != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-B", str(copy / spec["script"])],
        env=variables,
        cwd=copy,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(result.stdout)
    if result.returncode:
        sys.exit(result.returncode)
    with open(os.environ["out"], "w") as file:
        file.write(result.stdout)


main()
