"""A command of ours that checks the repository, run in a copy of it; its report is the output.

spec: root (the repository), arguments (of hyperqwen).
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
    result = subprocess.run(
        [sys.executable, "-c", "from hyperqwen.cli import main; main(prog_name='hyperqwen')", *spec["arguments"]],
        cwd=copy,
        env=environment({"NO_COLOR": "1", "COLUMNS": "100"}, copy),
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
